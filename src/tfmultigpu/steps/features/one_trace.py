"""One trace for all replicas: a start that hardly grows with their number."""

from __future__ import annotations

from tfmultigpu.steps.features.feature import Feature


class OneTrace(Feature):
    """Has the function of a replica traced once, and called by all replicas.

    For many GPUs and a deep model, which take minutes to their first step; on CPUs large models do
    it by themselves. Gradients of a replica are then sent together, when its backward pass is over.
    Results are the same up to the last bit; ``step.trace.why_each`` says why, if each replica needs
    a trace all the same.

    Example:
        >>> import keras, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     optimizer = keras.optimizers.SGD()
        >>> once = [tmg.steps.OneTrace()]
        >>> step = tmg.make_train_step(model, optimizer, "mse", strategy, features=once)
    """

    traces_once = True
