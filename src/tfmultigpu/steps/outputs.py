"""Outputs of a model, paired with their losses, labels, weights and metrics."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.steps.build_model import call_on_shapes
from tfmultigpu.strategies.scopes import check_scope, refuse_legacy_keras
from tfmultigpu.types import BatchSpec, KerasModel


class Output(NamedTuple):
    """Output of a model, with its loss, labels and weights."""

    name: str | None  # None if the model has a single output.
    y_true: Any
    y_pred: Any
    sample_weight: Any
    loss: Any  # A Keras loss, or None for an output without one.
    factor: float = 1.0  # The loss weight.


def match_outputs(
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
    losses: Any,
    loss_weights: Any = None,
    names: Sequence[str] | None = None,
) -> list[Output]:
    """Pairs each output of a model with its loss, labels, weight and loss weight."""
    keys: list[Any] = [None]
    predicted = [y_pred]
    if isinstance(y_pred, Mapping):
        keys = sorted(y_pred, key=str)  # As Keras orders them, for what is given as a list.
        predicted = [y_pred[key] for key in keys]
    elif isinstance(y_pred, (list, tuple)):
        named = names is not None and len(names) == len(y_pred)
        keys = list(names or ()) if named else [f"output_{i}" for i in range(len(y_pred))]
        predicted = list(y_pred)
    factors = [1.0 if f is None else f for f in _spread(loss_weights, keys, "loss_weights")]
    if not all(isinstance(factor, numbers.Real) for factor in factors):
        raise LossError(
            "loss_weights are numbers, which a step reads once.",
            repr(factors),
            "For a weight that changes write forward=f(model, batch, training), which reads a "
            "variable.",
        )
    columns = (
        keys,
        _spread(y_true, keys, "labels", shared=False),
        predicted,
        _spread(sample_weight, keys, "sample weights"),
        _spread(losses, keys, "losses"),
        map(float, factors),
    )
    return [Output(*row) for row in zip(*columns, strict=True)]


def _spread(value: Any, keys: Sequence[Any], what: str, *, shared: bool = True) -> list[Any]:
    """Returns what belongs to each output; the only output without a name is called None."""
    if isinstance(value, Mapping) and keys == [None]:
        value = list(value.values())
    if isinstance(value, Mapping) and not set(value) - set(keys):
        return [value.get(key) for key in keys]
    if isinstance(value, (list, tuple)) and len(value) == len(keys):
        return list(value)
    several = isinstance(value, (Mapping, list, tuple))
    if not several and (value is None or shared or len(keys) == 1):
        return [value] * len(keys)
    outputs = "one output" if keys == [None] else f"{len(keys)} outputs {list(keys)}"
    given = list(value) if several else value
    raise LossError(
        f"The model has {outputs}, and the {what} do not fit.",
        repr(tf.type_spec_from_value(given) if tf.is_tensor(given) else given),
        "Give one per output: a list in their order, or a dict by name.",
    )


class StepMetrics:
    """The metrics that a step updates; TensorFlow adds their states over the replicas.

    Attributes:
        all: All of them.
    """

    def __init__(self, plain: Any, forward: Any, strategy: tf.distribute.Strategy) -> None:
        """Use it for metrics: a sequence, or a dict or list by output; and the forward pass."""
        if forward.forward is not None and tf.nest.flatten(plain):
            raise LossError(
                "With forward the step sees no labels and predictions, so it cannot update "
                "metrics.",
                f"metrics={plain!r}",
                "Call metric.update_state(y_true, y_pred) inside forward instead.",
            )
        weighted = forward.objective.weighted_metrics
        self._plain, self._weighted, self._strategy = plain, weighted, strategy
        metrics = tf.nest.flatten([plain, weighted])
        self.all = tuple(metric for metric in metrics if metric is not None)
        for metric in self.all:
            _check(metric, strategy)

    def build(self, model: KerasModel, batch_spec: BatchSpec) -> None:
        """Creates, in the scope, the variables of metrics that wait for shapes (``F1Score``)."""
        if not any(_compat.waits_for_shapes(metric) for metric in self.all):
            return
        x, y_true, weight = unpack_batch(batch_spec)
        names = getattr(model, "output_names", None)
        outputs = match_outputs(y_true, call_on_shapes(model, x), weight, None, names=names)
        for metric, output, _ in self._matched(outputs):
            if _compat.waits_for_shapes(metric):
                specs = output.y_true, output.y_pred
                zeros = [tf.zeros([size or 1 for size in s.shape], s.dtype) for s in specs]
                with self._strategy.scope():
                    metric.update_state(*zeros)
                    metric.reset_state()

    def update(self, outputs: Sequence[Output]) -> None:
        """Updates all metrics with the outputs of one replica; call it in replica context."""
        for metric, output, weights in self._matched(outputs):
            metric.update_state(output.y_true, output.y_pred, **weights)

    def _matched(self, outputs: Sequence[Output]) -> list[tuple[Any, Output, dict[str, Any]]]:
        """Pairs metrics with their outputs, and with their sample weights if they are weighted."""
        matched = []
        for metrics, is_weighted in ((self._plain, False), (self._weighted, True)):
            if not metrics:
                continue
            single = len(outputs) == 1 and not isinstance(metrics, Mapping)
            keys = [output.name for output in outputs]
            each = _spread([metrics] if single else metrics, keys, "metrics", shared=False)
            for own, output in zip(each, outputs, strict=True):
                weights = {"sample_weight": output.sample_weight} if is_weighted else {}
                for metric in own if isinstance(own, (list, tuple)) else [own]:
                    matched += [] if metric is None else [(metric, output, weights)]
        return matched


def _check(metric: Any, strategy: tf.distribute.Strategy) -> None:
    refuse_legacy_keras(metric)
    takes_labels = isinstance(metric, keras.metrics.Metric)
    try:
        inspect.signature(metric.update_state).bind("y_true", "y_pred")
        takes_labels &= type(metric) not in (keras.metrics.Mean, keras.metrics.Sum)
    except (AttributeError, TypeError):
        takes_labels = False
    if not takes_labels:
        raise LossError(
            "A metric of a step is a keras.metrics.Metric that compares labels with predictions: "
            "update_state(y_true, y_pred).",
            repr(metric),
            "The loss is in the logs of each step; other values come from forward, or from the "
            "logs.",
        )
    check_scope(metric.variables, strategy, "metric")
