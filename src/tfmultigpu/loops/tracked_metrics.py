"""Metrics that a step updates itself, for the logs of an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["EpochMetrics", "TrackedMetrics", "metrics_that_assign"]


class EpochMetrics(Protocol):
    """Metrics that are reset before an epoch and read after it."""

    def reset(self) -> None:
        """Resets all metrics."""

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""


@dataclasses.dataclass(frozen=True)
class TrackedMetrics:
    """Metrics that are reset before an epoch and read after it, as ``Compiled`` has them.

    Attributes:
        metrics: Keras metrics.
    """

    metrics: tuple[Any, ...]

    def reset(self) -> None:
        """Resets all metrics."""
        for metric in self.metrics:
            metric.reset_state()

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [variable for metric in self.metrics for variable in metric.variables]

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""
        return {metric.name: metric.result() for metric in self.metrics}


def metrics_that_assign(models: Iterable[Any], assigned: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the metrics of models that have one of these variables, each once.

    Args:
        models: Keras models.
        assigned: Keras variables that a forward pass assigns.
    """
    changed = {id(variable) for variable in assigned}
    found = {id(metric): metric for model in models for metric in getattr(model, "metrics", ())}
    return tuple(one for one in found.values() if any(id(v) in changed for v in one.variables))
