"""Outputs of a model, paired with their losses, labels, weights and metrics."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import LossError


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
    columns = (
        keys,
        _spread(y_true, keys, "labels", shared=False),
        predicted,
        _spread(sample_weight, keys, "sample weights"),
        _spread(losses, keys, "losses"),
        map(_factor, _spread(loss_weights, keys, "loss_weights")),
    )
    return [Output(*row) for row in zip(*columns, strict=True)]


def match_metrics(metrics: Any, outputs: Sequence[Output]) -> list[tuple[Any, Output]]:
    """Pairs metrics with their outputs."""
    if not metrics:
        return []
    if len(outputs) == 1 and not isinstance(metrics, Mapping):
        metrics = [metrics]
    each = _spread(metrics, [output.name for output in outputs], "metrics", shared=False)
    return [
        (metric, output)
        for own, output in zip(each, outputs, strict=True)
        for metric in (own if isinstance(own, (list, tuple)) else [own])
        if metric is not None
    ]


def _factor(value: Any) -> float:
    if value is None or isinstance(value, numbers.Real):
        return 1.0 if value is None else float(value)
    raise LossError(
        f"loss_weights are numbers, which a step takes in once. Received: {value!r}. For a weight "
        "that changes write forward=f(model, batch, training), which may read a variable."
    )


def _spread(value: Any, keys: Sequence[Any], what: str, *, shared: bool = True) -> list[Any]:
    """Returns what belongs to each output; the only output without a name is called None."""
    if isinstance(value, Mapping):
        if keys == [None]:
            return _spread(list(value.values()), keys, what)
        if unknown := sorted(set(value) - set(keys)):
            raise LossError(
                f"There are {what} for outputs that the model does not have. Received: {unknown}. "
                f"Use its outputs: {list(keys)}."
            )
        return [value.get(key) for key in keys]
    if isinstance(value, (list, tuple)):
        if len(value) != len(keys):
            has = "one output" if keys == [None] else f"{len(keys)} outputs {list(keys)}"
            raise LossError(
                f"The model has {has}, but there are {len(value)} {what}. Received: {value!r}. "
                "Give one per output, in order, or a dict by name."
            )
        return list(value)
    if value is None or shared or len(keys) == 1:
        return [value] * len(keys)
    raise LossError(
        f"The model has {len(keys)} outputs {list(keys)}, but the {what} are a single value. "
        f"Received: {tf.type_spec_from_value(value) if tf.is_tensor(value) else value!r}. Give a "
        "dict or a tuple with one per output."
    )
