"""Outputs of a model, paired with their losses, labels, weights and metrics."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import brief
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.lists import present
from tfmultigpu.steps.build_model import call_on_shapes
from tfmultigpu.strategies.scopes import check_scope, refuse_legacy_keras
from tfmultigpu.types import KerasModel, Nested, Options, Tensor

_WITHOUT_LABELS = keras.metrics.Mean, keras.metrics.Sum
_BY_SHAPES = {
    "accuracy": "Accuracy",
    "acc": "Accuracy",
    "crossentropy": "Crossentropy",
    "ce": "Crossentropy",
}
_LABELS = "SparseCategorical", "Categorical", "Binary"


class Output(NamedTuple):
    """Output of a model, with its loss, labels and weights."""

    name: str | None  # None if the model has a single output.
    y_true: Nested
    y_pred: Nested
    sample_weight: Tensor
    loss: Any  # A Keras loss, or None for an output without one.
    factor: float = 1.0  # The loss weight.


def match_outputs(
    y_true: Nested,
    y_pred: Nested,
    sample_weight: Nested,
    losses: Any,
    loss_weights: Nested,
    names: Sequence[str] | None,
) -> list[Output]:
    """Pairs each output of a model with its loss, labels, weight and loss weight."""
    keys: list[object] = [None]
    predicted = [y_pred]
    if isinstance(y_pred, Mapping):
        keys = sorted(y_pred, key=str)  # As Keras orders them, for what is given as a list.
        predicted = list(map(y_pred.get, keys))
    elif isinstance(y_pred, (list, tuple)):
        keys = [f"output_{i}" for i in range(len(y_pred))]
        if names is not None and len(names) == len(y_pred):
            keys = list(names)
        predicted = list(y_pred)
    factors = _spread(loss_weights, keys, "loss_weights")
    factors = [1.0 if factor is None else factor for factor in factors]
    if not all(isinstance(factor, numbers.Real) for factor in factors):
        raise LossError(
            "loss_weights are numbers, which a step reads once.",
            brief(factors),
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


def _spread(
    value: Nested, keys: Sequence[object], what: str, *, shared: bool = True
) -> list[Nested]:
    """Returns what belongs to each output; the only output without a name is called None."""
    if isinstance(value, Mapping) and keys == [None]:
        value = list(value.values())
    if isinstance(value, Mapping) and not set(value) - set(keys):
        return list(map(value.get, keys))
    if isinstance(value, (list, tuple)) and len(value) == len(keys):
        return list(value)
    several = isinstance(value, (Mapping, list, tuple))
    if not several and (value is None or shared or len(keys) == 1):
        return [value] * len(keys)
    outputs = "one output" if keys == [None] else f"{len(keys)} outputs {list(keys)}"
    given = list(value) if several else value
    raise LossError(
        f"The model has {outputs}, and the {what} do not fit.",
        brief(given),
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
                f"metrics={brief(plain)}",
                "Make it an attribute of the model, and call model.metric.update_state(y, outputs) "
                "in forward.",
            )
        weighted = forward.objective.weighted_metrics
        self._plain, self._weighted, self._strategy = plain, weighted, strategy
        metrics = tf.nest.flatten([plain, weighted])
        self.all = tuple(present(metrics))
        for metric in self.all:
            _check(metric, strategy)

    def build(self, model: KerasModel, batch_spec: Any) -> None:
        """Creates, in the scope, the variables of metrics that wait for shapes (``F1Score``)."""
        if not any(map(_compat.waits_for_shapes, self.all)):
            return
        x, y_true, weight = unpack_batch(batch_spec)
        names = getattr(model, "output_names", None)
        outputs = match_outputs(y_true, call_on_shapes(model, x), weight, None, None, names)
        for metric, output, _ in self._matched(outputs):
            if _compat.waits_for_shapes(metric):
                with self._strategy.scope():
                    metric.update_state(_zeros(output.y_true), _zeros(output.y_pred))
                    metric.reset_state()

    def update(self, outputs: Sequence[Output]) -> None:
        """Updates all metrics with the outputs of one replica; call it in replica context."""
        for metric, output, weights in self._matched(outputs):
            metric.update_state(output.y_true, output.y_pred, **weights)

    def _matched(self, outputs: Sequence[Output]) -> list[tuple[Any, Output, Options]]:
        """Pairs metrics with their outputs, and with their sample weights if they are weighted."""
        matched = []
        for metrics, is_weighted in ((self._plain, False), (self._weighted, True)):
            if not metrics:
                continue
            single = len(outputs) == 1 and not isinstance(metrics, Mapping)
            keys = [output.name for output in outputs]
            each = _spread([metrics] if single else metrics, keys, "metrics", shared=False)
            for own, output in zip(each, outputs, strict=True):
                weights = {}
                if is_weighted:
                    weights["sample_weight"] = output.sample_weight
                for metric in present(tf.nest.flatten(own)):
                    matched.append((metric, output, weights))
        return matched


def _zeros(spec: Any) -> tf.Tensor:
    return tf.zeros([size or 1 for size in spec.shape], spec.dtype)


def _line_for(given: Any) -> str:
    """Returns the line to write in place of what is not a metric of labels and predictions."""
    kind = given
    if isinstance(given, str):
        if given in _BY_SHAPES:  # Of which model.compile chooses one, by the shapes.
            kinds = [f"keras.metrics.{labels}{_BY_SHAPES[given]}()" for labels in _LABELS]
            return f"Create it in strategy.scope(), by your labels: {' or '.join(kinds)}."
        with suppress(ValueError):  # No metric has this name.
            kind = type(keras.metrics.get(given))
    if inspect.isfunction(kind):
        line = f"keras.metrics.MeanMetricWrapper({kind.__name__})"
    elif inspect.isclass(kind) and kind not in _WITHOUT_LABELS:
        home = "keras.metrics." if hasattr(keras.metrics, kind.__name__) else ""
        line = f"{home}{kind.__name__}()"
    else:
        return (
            "The loss is in the logs of each step; other values come from forward, or from the "
            "logs."
        )
    return f"Create it in strategy.scope(): metrics=[{line}]."


def _check(metric: Any, strategy: tf.distribute.Strategy) -> None:
    refuse_legacy_keras(metric)
    takes_labels = isinstance(metric, keras.metrics.Metric)
    try:
        inspect.signature(metric.update_state).bind("y_true", "y_pred")
        takes_labels &= type(metric) not in _WITHOUT_LABELS
    except (AttributeError, TypeError):
        takes_labels = False
    if not takes_labels:
        raise LossError(
            "A metric of a step is a keras.metrics.Metric that compares labels with predictions: "
            "update_state(y_true, y_pred).",
            brief(metric),
            _line_for(metric),
        )
    check_scope(metric.variables, strategy, "metric")
