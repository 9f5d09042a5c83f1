"""Outputs of a model, paired with their losses, labels, weights and metrics."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import LossError

__all__ = [
    "Output",
    "match_metrics",
    "match_outputs",
]


@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a model, with its loss, labels and weights.

    Attributes:
        name: Its name, or None if the model has a single output.
        y_true: Labels.
        y_pred: Predictions.
        sample_weight: Weights, or None.
        loss: A Keras loss, or None for an output without one.
        factor: The loss weight.
    """

    name: str | None
    y_true: Any
    y_pred: Any
    sample_weight: Any
    loss: Any
    factor: float = 1.0


def match_outputs(
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
    losses: Any,
    loss_weights: Any = None,
    names: Sequence[str] | None = None,
) -> list[Output]:
    """Pairs each output of a model with its loss, labels, weight and loss weight.

    Args:
        y_true: Labels: one tensor, or a dict or sequence like the outputs.
        y_pred: Predictions: one tensor, or a dict or sequence.
        sample_weight: None, one tensor for all outputs, or a dict or sequence.
        losses: One loss for all outputs, or a dict or sequence (None: no loss).
        loss_weights: None, one number, or a dict or sequence of numbers.
        names: Names of the outputs of the model, for a dict beside a sequence of outputs.

    Raises:
        LossError: Losses, labels or weights do not fit the outputs.
    """
    if not isinstance(y_pred, (Mapping, list, tuple)):
        return [
            Output(
                None,
                _only(y_true, "labels"),
                y_pred,
                _only(sample_weight, "sample weights"),
                _only(losses, "losses"),
                _factor(_only(loss_weights, "loss_weights")),
            )
        ]
    keys = _keys(y_pred, names)
    predicted = [y_pred[key] for key in keys] if isinstance(y_pred, Mapping) else list(y_pred)
    labels = _spread(y_true, keys, "labels", shared=False)
    weights = _spread(sample_weight, keys, "sample weights", shared=True)
    each = _spread(losses, keys, "losses", shared=True)
    factors = _spread(loss_weights, keys, "loss_weights", shared=True)
    return [
        Output(key, y, p, w, loss, _factor(factor))
        for key, y, p, w, loss, factor in zip(
            keys, labels, predicted, weights, each, factors, strict=True
        )
    ]


def match_metrics(metrics: Any, outputs: Sequence[Output]) -> list[tuple[Any, Output]]:
    """Pairs metrics with their outputs.

    Args:
        metrics: A sequence of metrics for one output; for several, a dict or a sequence with a
            metric or a sequence of metrics per output.
        outputs: The outputs of the model.

    Raises:
        LossError: The metrics are not assigned to the outputs.
    """
    if not metrics:
        return []
    if len(outputs) == 1 and not isinstance(metrics, Mapping):
        return [(metric, outputs[0]) for metric in _as_list(metrics)]
    if not isinstance(metrics, Mapping) and len(metrics) != len(outputs):
        raise LossError(
            f"The model has {len(outputs)} outputs, and the metrics are not assigned to them. "
            f"Received: {len(metrics)} metrics. Give a dict: metrics={{"
            + ", ".join(f"{output.name!r}: [...]" for output in outputs)
            + "}."
        )
    keys = [output.name or "" for output in outputs]
    if isinstance(metrics, Mapping) and len(outputs) == 1:
        keys = list(metrics)
    spread = _spread(metrics, keys, "metrics", shared=False)
    return [(m, o) for ms, o in zip(spread, outputs, strict=True) for m in _as_list(ms)]


def _factor(value: Any) -> float:
    if value is None or isinstance(value, numbers.Real):
        return 1.0 if value is None else float(value)
    raise LossError(
        f"loss_weights are numbers, which a step takes in once. Received: {value!r}. For a weight "
        "that changes write forward=f(model, batch, training), which may read a variable."
    )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _keys(y_pred: Any, names: Sequence[str] | None) -> list[str]:
    if isinstance(y_pred, Mapping):
        return sorted(y_pred, key=str)  # As Keras orders them, for what is given as a list.
    if names is not None and len(names) == len(y_pred):
        return list(names)
    return [f"output_{i}" for i in range(len(y_pred))]


def _only(value: Any, what: str) -> Any:
    """Returns the only element of a container given for a single output."""
    items = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple)):
        return value
    if len(items) != 1:
        raise LossError(
            f"The model has one output, but there are {len(items)} {what}. Received: {value!r}. "
            "Give one."
        )
    return items[0]


def _spread(value: Any, keys: Sequence[str], what: str, *, shared: bool) -> list[Any]:
    if value is None:
        return [None] * len(keys)
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(keys))
        if unknown:
            raise LossError(
                f"There are {what} for outputs that the model does not have. Received: {unknown}. "
                f"Use its outputs: {list(keys)}."
            )
        return [value.get(key) for key in keys]
    if isinstance(value, (list, tuple)):
        if len(value) != len(keys):
            raise LossError(
                f"The model has {len(keys)} outputs {list(keys)}, but there are {len(value)} "
                f"{what}. Give one per output, in order, or a dict by name."
            )
        return list(value)
    if shared:
        return [value] * len(keys)
    raise LossError(
        f"The model has {len(keys)} outputs {list(keys)}, but the {what} are a single value. "
        f"Received: {tf.type_spec_from_value(value) if tf.is_tensor(value) else value!r}. Give a "
        "dict or a tuple with one per output."
    )
