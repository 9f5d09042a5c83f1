"""Train steps: the same result on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfmultigpu.losses.metrics import check_metrics
from tfmultigpu.losses.objective import Objective
from tfmultigpu.steps.evaluate import make_eval_step, make_predict_step
from tfmultigpu.steps.micro_batches import micro_batch_counts
from tfmultigpu.steps.options import StepOptions
from tfmultigpu.steps.program_agreement import ProgramAgreement
from tfmultigpu.steps.train_step import TrainStep
from tfmultigpu.strategies.scopes import check_backend, check_kinds
from tfmultigpu.types import LossScaling, Models, Optimizer, ShardUpdate, Strategy, Verify

__all__ = ["TrainStep", "make_eval_step", "make_predict_step", "make_train_step"]


def make_train_step(
    model: Models,
    optimizer: Optimizer,
    loss: Any,
    strategy: Strategy | None = None,
    *,
    metrics: Any = (),
    weighted_metrics: Any = (),
    loss_weights: Any = None,
    micro_batches: int | Sequence[int] = 1,
    forward: Callable[[Any, Any, bool], Any] | None = None,
    variables: Sequence[Any] | None = None,
    clip_norm: float | None = None,
    loss_scale: LossScaling = None,
    shard_update: ShardUpdate = "auto",
    reduce_dtype: Literal["bfloat16"] | None = None,
    jit_compile: bool = False,
    pipeline: bool = False,
    verify: Verify = "first",
) -> TrainStep:
    """Makes a train step that gives on N replicas what one device gives on the same global batches.

    Args:
        model: A Keras model created in ``strategy.scope()``; with ``forward`` also a list or dict
            of built models.
        optimizer: A Keras optimizer created in the scope; its variables are made here. Clipping set
            on it acts on the gradient of the global batch. A
            ``keras.optimizers.LossScaleOptimizer`` means ``loss_scale="dynamic"``.
        loss: A Keras loss, its name, a function ``f(y_true, y_pred)`` of per-example values, or a
            dict or list of them for several outputs. None with ``forward``.
        strategy: The strategy; ``tf.distribute.get_strategy()`` where None.
        metrics: Keras metrics created in the scope, updated without sample weights; for several
            outputs a dict by output. Their states are added over replicas, so a metric of your own
            must keep sums and counts; anything else is refused at the first step.
        weighted_metrics: The same, updated with sample weights.
        loss_weights: A number, or a dict or list of numbers, one per output.
        micro_batches: Into how many parts each replica's shard is cut and computed one after the
            other, to save memory; or one such number for each replica, of all workers, as from
            ``plan_micro_batches``. The result is that of 1, except for layers that look at a whole
            batch (BatchNormalization) or count calls: they see each part.
        forward: ``f(model, batch, training) -> LossSum`` for what a loss cannot say. It may return
            ``loss, {"name": (sum, weight)}``: values for the logs, which are added over replicas
            and divided once, as the loss is. Weight regularisation and ``add_loss`` are added by
            the step.
        variables: The variables to train, of the model; None means all its trainable ones.
        clip_norm: Largest global norm of the gradient; larger ones are scaled down to it.
        loss_scale: For float16: ``"dynamic"`` or a number. A step whose global gradient is not
            finite is skipped on every replica.
        shard_update: Whether each variable is updated by one replica, which keeps what the
            optimizer remembers of it, and then copied to the others: True, False, or ``"auto"``
            where it can be and is known to be faster. The result is the same.
        reduce_dtype: ``"bfloat16"`` sends float32 gradients in it, for slow connections. That is
            not exact: a sum over N replicas is off by up to N / 256 of the sum of absolute values.
        jit_compile: Compile forward and backward with XLA.
        pipeline: For a model on one replica whose layers were built under ``tf.device`` on several
            devices: compute as many micro-batches side by side as there are devices. The result is
            the same. Tracing takes longer, in proportion to ``micro_batches``.
        verify: When to hold a step to what one device computes on the same global batch, and warn
            of what differs: ``"first"``, True for every step, False, or ``"gradients"``, which also
            compares the gradients of the first. See ``TrainStep.verification``.

    Returns:
        The step: ``logs = step(batch)``, ``logs = step.run(iterator, steps)``.

    Raises:
        ScopeError: Model, optimizer or a metric was created outside the scope.
        LossError: The loss is none, or not one value per example.
        LossError: A metric cannot be added over replicas.
        TfMultiGpuError: Keras does not run on TensorFlow.
        TfMultiGpuError: ``shard_update=True`` or ``pipeline=True`` cannot be had.
        ValueError: An option has a value that it cannot have.
        ClusterError: Workers have different models, losses, optimizers or settings; here or
            at the first step.

    Warns:
        ReplicaDependenceWarning: The first step computed something else than one device would.

    Example:
        >>> import keras, numpy as np, tfmultigpu as tmg
        >>> strategy = tmg.create_strategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        ...     optimizer = keras.optimizers.SGD(0.1)
        >>> arrays = np.ones((5, 3)), np.ones((5, 1))
        >>> data = tmg.distribute_dataset(arrays, strategy, batch_size=2)
        >>> step = tmg.make_train_step(model, optimizer, "mse", strategy)
        >>> [float(step(batch)["weight"]) for batch in data]
        [2.0, 2.0, 1.0]
    """
    check_backend()
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    objective = Objective.of(model, loss, loss_weights, forward, variables)
    check_kinds(objective.model, strategy, optimizer)
    options = StepOptions.of(
        metrics=metrics,
        weighted_metrics=weighted_metrics,
        micro_batches=micro_batch_counts(micro_batches, strategy.num_replicas_in_sync),
        clip_norm=clip_norm,
        loss_scale=loss_scale,
        shard_update=shard_update,
        reduce_dtype=reduce_dtype,
        jit_compile=jit_compile,
        pipeline=pipeline,
        verify=verify,
    )
    check_metrics(metrics, strategy)
    check_metrics(weighted_metrics, strategy)
    objective.check_metrics_allowed(metrics, weighted_metrics)
    agreement = ProgramAgreement(
        strategy,
        {
            "loss": loss,
            "forward": forward,
            "variables": variables and [variable.path for variable in variables],
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "micro_batches": options.micro_batches,
            "clip_norm": options.clip_norm,
            "loss_scale": loss_scale,
            "shard_update": shard_update,
            "reduce_dtype": reduce_dtype,
        },
    )
    return TrainStep(objective, optimizer, strategy, options, agreement)
