"""Metrics that a step updates itself, for the logs of an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = [
    "EpochMetrics",
    "JoinedMetrics",
    "TrackedMetrics",
    "metrics_that_assign",
    "with_own_metrics",
]


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


@dataclasses.dataclass(frozen=True)
class JoinedMetrics:
    """Compiled metrics, and those that a model updates itself.

    Attributes:
        first: The compiled metrics; their results count if a name occurs twice.
        second: The others.
    """

    first: Any
    second: TrackedMetrics

    @property
    def arguments(self) -> Any:
        """The arguments of ``model.compile``, which the cache keeps alive."""
        return self.first.arguments

    def reset(self) -> None:
        """Resets all metrics."""
        self.first.reset()
        self.second.reset()

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [*self.first.variables, *self.second.variables]

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""
        return {**self.second.results(), **self.first.results()}


def with_own_metrics(compiled: Any, own: tuple[Any, ...]) -> EpochMetrics:
    """Returns compiled metrics together with those that a model updates itself, if any."""
    found: EpochMetrics = JoinedMetrics(compiled, TrackedMetrics(own)) if own else compiled
    return found


def metrics_that_assign(models: Iterable[Any], assigned: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the metrics of models that have one of these variables, each once.

    Args:
        models: Keras models.
        assigned: Keras variables that a forward pass assigns.
    """
    changed = {id(variable) for variable in assigned}
    found = {id(metric): metric for model in models for metric in getattr(model, "metrics", ())}
    return tuple(one for one in found.values() if any(id(v) in changed for v in one.variables))
