"""Logs as Keras has them, made of sums: each value is divided once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfmultigpu.accumulation.losses import LossTerm
from tfmultigpu.steps.tally import Layout, Numbers
from tfmultigpu.types import Array, KerasModel, Scalar, StepSums, Tensor


def epoch_logs(
    sums: Mapping[str, StepSums], metrics: Mapping[str, Scalar], *, by_rows: bool
) -> dict[str, Scalar | Array]:
    """Returns the logs of an epoch, sorted: with the losses of outputs only if there are several.

    Args:
        sums: For each step the sums of its tally.
        metrics: The results of the metrics.
        by_rows: Whether losses are means of the batches' losses, each by its rows.
    """
    losses: dict[str, Tensor] = {}
    for step, (numbers, fields) in sums.items():
        terms = [LossTerm(**each) for each in fields]
        means = Layout(tuple(terms)).means(Numbers.of(numbers), by_rows=by_rows)
        for name, value in means.items():
            if name.endswith("loss"):
                losses[f"{step}_{name}" if step else name] = value
    if both := sorted(losses.keys() & metrics.keys()):
        raise ValueError(
            "A metric has the name of a loss, so one of them would be lost. Received: "
            f"{both}. Give the metric another name: keras.metrics.Mean(name=...)."
        )
    logs = dict(losses)
    if len(losses) == 2 and "loss" in losses:  # Of one output, which has the same loss.
        logs = {"loss": losses["loss"]}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            logs.update(value)
        else:
            logs[name] = value
    return {name: _number(logs[name]) for name in sorted(logs)}


def as_list(model: KerasModel, logs: Mapping[str, Scalar]) -> Scalar | list[Scalar]:
    """Returns logs as ``model.evaluate`` of Keras does without ``return_dict``.

    That is the loss, compiled metrics, losses of outputs, then the rest by name; a single value by
    itself.
    """
    names: list[str] = []
    for metric in model.metrics:
        # The container of compiled metrics has several.
        names += [each.name for each in getattr(metric, "metrics", [metric])]
    # Keras tracks these only once it has trained or evaluated the model itself.
    names += [f"{name}_loss" for name in getattr(model, "output_names", None) or []]
    names += sorted(logs)
    values = [logs[name] for name in dict.fromkeys(names) if name in logs]
    if len(values) == 1:
        return values[0]
    return values


def _number(value: Scalar) -> Scalar | Array:
    array = np.asarray(value)
    if array.ndim:
        return array
    return array.item()
