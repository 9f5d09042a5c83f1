"""Logs as Keras has them, made of sums: each value is divided once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmultigpu.steps.tally import Tally


def training_logs(sums: Mapping[str, float], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of an epoch: losses are means over its rows.

    A value of ``forward`` that has a weight is divided by the sum of its weights.
    """
    values = {name: sums[name] for name in sums if f"{name}_weight" in sums}
    means = {
        name: value / sums[f"{name}_weight"] if sums[f"{name}_weight"] else 0.0
        for name, value in values.items()
    }
    losses = {
        name: sums[name] / sums["rows"]
        for name in sums
        if name.endswith("loss") and name not in values
    }
    return as_keras(losses, _distinct({**losses, **means}, means, metrics))


def evaluation_logs(tally: Tally, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of an evaluation, from the numbers of an eval step over all batches."""
    logs = tally.logs()
    terms = tally.layout.terms if tally.layout else ()
    values = {str(term.name): logs[str(term.name)] for term in terms if term.logged}
    losses = {name: value for name, value in logs.items() if name not in values}
    return as_keras(losses, _distinct(logs, values, metrics))


def _distinct(
    taken: Mapping[Any, Any], values: Mapping[str, Any], metrics: Mapping[str, Any]
) -> dict[str, Any]:
    if both := sorted(taken.keys() & metrics.keys()):
        raise ValueError(
            "A metric has the name of a loss or of a value of forward, so one of them would be "
            f"lost. Received: {both}. Give the metric another name: keras.metrics.Mean(name=...)."
        )
    return {**values, **metrics}


def as_keras(losses: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of Keras, sorted: with the losses of outputs only if there are several.

    ``losses`` are the loss and that of each output, or those of several steps.
    """
    logs: dict[str, Any] = {n: losses[n] for n in losses if n == "loss" or n.endswith("_loss")}
    if len(logs) == 2 and "loss" in logs:
        logs = {"loss": losses["loss"]}
    for name, value in others.items():
        logs.update(value if isinstance(value, Mapping) else {name: value})
    return {name: _number(logs[name]) for name in sorted(logs)}


def as_list(model: Any, logs: Mapping[str, Any]) -> Any:
    """Returns logs as ``model.evaluate`` of Keras does without ``return_dict``.

    That is the loss, compiled metrics, losses of outputs, then the rest by name; a single value by
    itself.
    """
    names = []
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)  # Of the container of compiled metrics.
        names += [metric.name] if inner is None else [each.name for each in inner]
    # Keras tracks these only once it has trained or evaluated the model itself.
    names += [f"{name}_loss" for name in getattr(model, "output_names", None) or []]
    first = [name for name in dict.fromkeys(names) if name in logs]
    values = [logs[name] for name in [*first, *sorted(set(logs) - set(first))]]
    return values[0] if len(values) == 1 else values


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array
