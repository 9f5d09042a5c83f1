"""One trace for all replicas: a start that hardly grows with their number."""

from __future__ import annotations

from tfmultigpu.steps.features.feature import Feature


class OneTrace(Feature):
    """Traces the function of a replica once, and lets all replicas call it.

    Use it for many GPUs and a deep model, which need minutes for their first step; on CPUs large
    models do it by themselves. A replica
    then sends all its gradients together, after its backward pass. Results are the same up to the
    last bit. If each replica needs a trace all the same, ``step.why_each`` says why.

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
