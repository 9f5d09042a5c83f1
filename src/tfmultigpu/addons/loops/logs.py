"""Logs as Keras has them, made of sums: each value is divided once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfmultigpu.accumulation.losses import LossTerm
from tfmultigpu.steps.tally import Layout, Numbers
from tfmultigpu.types import KerasModel


def epoch_logs(
    sums: Mapping[str, tuple[Any, Any]], metrics: Mapping[str, Any], *, by_rows: bool
) -> dict[str, Any]:
    """Returns the logs of an epoch, sorted: with the losses of outputs only if there are several.

    ``sums`` has the sums of the tally of each step, and the fields of its terms.
    """
    losses: dict[str, Any] = {}
    for step, (numbers, terms) in sums.items():
        layout = Layout(tuple(LossTerm(**fields) for fields in terms))
        for name, value in layout.means(Numbers.of(numbers), by_rows=by_rows).items():
            if name.endswith("loss"):
                losses[f"{step}_{name}" if step else name] = value
    if both := sorted(losses.keys() & metrics.keys()):
        raise ValueError(
            "A metric has the name of a loss, so one of them would be lost. Received: "
            f"{both}. Give the metric another name: keras.metrics.Mean(name=...)."
        )
    logs = {"loss": losses["loss"]} if len(losses) == 2 and "loss" in losses else losses
    for name, value in metrics.items():
        logs.update(value if isinstance(value, Mapping) else {name: value})
    return {name: _number(logs[name]) for name in sorted(logs)}


def as_list(model: KerasModel, logs: Mapping[str, Any]) -> Any:
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
