"""Updates of metrics on replicas that count each row once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.losses.build_model import symbolic
from tfmultigpu.losses.held_assignments import assign_if
from tfmultigpu.losses.metric_checks import (
    check_adds,
    check_starts_at_zero,
    is_from_keras,
    warn_unknown,
)
from tfmultigpu.losses.outputs import Output, match_metrics, match_outputs
from tfmultigpu.losses.recording import changing_assignments
from tfmultigpu.strategies.scopes import check_scope

__all__ = [
    "build_metrics",
    "check_metrics",
    "counting_once",
    "holds_what_counts",
    "update_metrics",
]


def check_metrics(metrics: Any, strategy: tf.distribute.Strategy) -> None:
    """Checks that metrics can be computed exactly over replicas.

    Args:
        metrics: A metric, or a nested structure of them.
        strategy: The strategy in whose scope they must have been created.

    Raises:
        LossError: A metric is not a Keras metric of labels and predictions, or its state is not a
            sum.
        ScopeError: A metric was created outside the scope.
    """
    import keras

    for metric in tf.nest.flatten(metrics):
        if metric is None:
            continue
        if not isinstance(metric, keras.metrics.Metric):
            raise LossError(
                f"A metric must be a keras.metrics.Metric. Received: {metric!r}. Create one in the "
                "scope: with strategy.scope(): metric = keras.metrics.SparseCategoricalAccuracy()."
            )
        if len(_positional(metric.update_state)) < 2 or type(metric).__name__ in ("Mean", "Sum"):
            raise LossError(
                "A metric of a step compares labels with predictions: update_state(y_true, "
                f"y_pred). Received: {type(metric).__name__} {metric.name!r}, which takes values. "
                "Read the loss from the logs of each step, and update other values from them "
                "yourself."
            )
        for variable in metric.variables:
            if strategy.num_replicas_in_sync > 1 and variable.aggregation != "sum":
                raise LossError(
                    "The state of a metric must be sums, which add over replicas. Received: "
                    f"variable {variable.path!r} of {metric.name!r} with aggregation="
                    f"{variable.aggregation!r}. Keep sums and counts, and divide in result()."
                )
        check_scope(metric.variables, strategy, "metric")


def build_metrics(
    metrics: Any, model: Any, batch_spec: Any, strategy: tf.distribute.Strategy
) -> None:
    """Prepares metrics for the shapes of a batch, before the first trace.

    Metrics that wait for shapes, such as ``F1Score``, create their variables in the scope. For
    several replicas, metrics that are not part of Keras are tried on synthetic batches.

    Args:
        metrics: Metrics as ``match_metrics`` takes them.
        model: The built model.
        batch_spec: Type specs of a batch.
        strategy: The strategy.

    Raises:
        LossError: A metric cannot be built from the shapes of the labels and predictions, or
            keeps a state that is not a sum over rows.
    """
    given = [metric for metric in tf.nest.flatten(metrics) if metric is not None]
    waiting = [metric for metric in given if _compat.waits_for_shapes(metric)]
    unknown = [
        metric
        for metric in given
        if strategy.num_replicas_in_sync > 1 and not is_from_keras(metric)
    ]
    if not waiting and not unknown:
        return
    x, y_true, weight = unpack_batch(batch_spec)
    try:
        y_pred = model(symbolic(x))
    except Exception as error:  # A model that only takes tensors may raise anything.
        if waiting:
            raise
        for metric in unknown:
            warn_unknown(metric, f"the model does not run on shapes alone ({error})")
        return
    names = getattr(model, "output_names", None)
    outputs = match_outputs(y_true, y_pred, weight, None, names=names)
    for metric, output in match_metrics(metrics, outputs):
        if any(metric is one for one in waiting):
            _build(metric, output, strategy)
        if any(metric is one for one in unknown):
            check_adds(metric, output.y_true, output.y_pred, output.sample_weight)
            check_starts_at_zero(metric, strategy)


def _build(metric: Any, output: Output, strategy: tf.distribute.Strategy) -> None:
    try:
        with strategy.scope():
            metric.update_state(_zeros(output.y_true), _zeros(output.y_pred))
            metric.reset_state()
    except (TypeError, ValueError) as error:
        raise LossError(
            f"The metric {metric.name!r} creates its variables in its first update, which is too "
            f"late on replicas. An update with zeros failed: {error} Create the variables in its "
            "__init__."
        ) from error


def _zeros(spec: Any) -> tf.Tensor:
    return tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype)


def holds_what_counts(row_weight: Any) -> Any:
    """Returns whether metrics count the rows of the calling replica.

    Of the copies of a small batch only the first replica's counts.

    Args:
        row_weight: The weight of each row of the batch on each replica; None: 1.

    Returns:
        A bool or a bool scalar.
    """
    first = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    return True if row_weight is None or first == 0 else tf.equal(row_weight, 1.0)


def counting_once(counts: Any) -> AbstractContextManager[None]:
    """Makes metrics that a forward function or a layer updates itself count each row once.

    Copies of a small batch that do not count leave the states of metrics unchanged. These states
    are the variables that TensorFlow adds over the replicas when they are read.

    Args:
        counts: Whether this replica's copy of its rows counts: a bool or a bool scalar.
    """
    known = counts if isinstance(counts, bool) else tf.get_static_value(counts)
    if known:
        return nullcontext()

    def assigned(variable: Any, value: Any) -> Any:
        if variable.aggregation != "sum" or variable.synchronization != "on_read":
            return value
        before = tf.convert_to_tensor(variable.value)
        return tf.where(counts, tf.cast(value, before.dtype), before)

    return changing_assignments(assigned)


def update_metrics(metrics: Any, outputs: Sequence[Output], counts: Any, *, weighted: bool) -> None:
    """Updates metrics with the predictions of one replica; call it in replica context.

    Args:
        metrics: Metrics as ``match_metrics`` takes them.
        outputs: The outputs of the model on this replica's shard.
        counts: Whether this replica's copy of the shard counts: a bool or a bool scalar.
        weighted: Whether the sample weights apply.
    """
    pairs = match_metrics(metrics, outputs)
    if not pairs:
        return

    def update() -> None:
        for metric, output in pairs:
            weight = {"sample_weight": output.sample_weight} if weighted else {}
            metric.update_state(output.y_true, output.y_pred, **weight)

    known = counts if isinstance(counts, bool) else tf.get_static_value(counts)
    if known:
        update()
    else:
        assign_if(counts, update)


def _positional(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return ["y_true", "y_pred"]
    return [parameter.name for parameter in parameters if parameter.kind in kinds]
