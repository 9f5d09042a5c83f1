"""Metrics of a step: checked, built before the first trace, and updated with each row once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.steps.build_model import symbolic
from tfmultigpu.steps.outputs import Output, match_metrics, match_outputs
from tfmultigpu.strategies.scopes import check_scope


class StepMetrics:
    """The metrics that a step updates.

    Their states are sums, which TensorFlow adds over the replicas. The first verified step shows
    whether that gives what one device would have.

    Attributes:
        all: All of them.
    """

    def __init__(self, plain: Any, weighted: Any, strategy: tf.distribute.Strategy) -> None:
        """Takes metrics without and with weights: a sequence, or a dict or list by output."""
        self._plain, self._weighted, self._strategy = plain, weighted, strategy
        metrics = tf.nest.flatten([plain, weighted])
        self.all = tuple(metric for metric in metrics if metric is not None)
        for metric in self.all:
            _check(metric, strategy)

    def build(self, model: Any, batch_spec: Any) -> None:
        """Creates, in the scope, the variables of metrics that wait for shapes (``F1Score``)."""
        if not any(_compat.waits_for_shapes(metric) for metric in self.all):
            return
        x, y_true, weight = unpack_batch(batch_spec)
        names = getattr(model, "output_names", None)
        outputs = match_outputs(y_true, model(symbolic(x)), weight, None, names=names)
        for metrics in (self._plain, self._weighted):
            for metric, output in match_metrics(metrics, outputs):
                if _compat.waits_for_shapes(metric):
                    _build(metric, output, self._strategy)

    def update(self, outputs: Sequence[Output]) -> None:
        """Updates all metrics with the outputs of one replica; call it in replica context."""
        for metric, output in match_metrics(self._plain, outputs):
            metric.update_state(output.y_true, output.y_pred)
        for metric, output in match_metrics(self._weighted, outputs):
            metric.update_state(output.y_true, output.y_pred, sample_weight=output.sample_weight)


def _check(metric: Any, strategy: tf.distribute.Strategy) -> None:
    import keras

    if not isinstance(metric, keras.metrics.Metric):
        raise LossError(
            f"A metric must be a keras.metrics.Metric. Received: {metric!r}. Create one in the "
            "scope: with strategy.scope(): metric = keras.metrics.SparseCategoricalAccuracy()."
        )
    try:
        inspect.signature(metric.update_state).bind("y_true", "y_pred")
        takes_values = type(metric) in (keras.metrics.Mean, keras.metrics.Sum)
    except TypeError:
        takes_values = True
    if takes_values:
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


def _build(metric: Any, output: Output, strategy: tf.distribute.Strategy) -> None:
    labels, predictions = (
        tf.zeros([size or 1 for size in spec.shape], spec.dtype)
        for spec in (output.y_true, output.y_pred)
    )
    try:
        with strategy.scope():
            metric.update_state(labels, predictions)
            metric.reset_state()
    except (TypeError, ValueError) as error:
        raise LossError(
            f"The metric {metric.name!r} creates its variables in its first update, which is too "
            f"late on replicas. An update with zeros failed: {error} Create the variables in its "
            "__init__."
        ) from error
