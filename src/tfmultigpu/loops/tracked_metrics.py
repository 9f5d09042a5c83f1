"""Metrics that a step updates itself, for the logs of an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
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
        metrics: Keras metrics, by the names in the logs.
    """

    metrics: Mapping[str, Any]

    @classmethod
    def of(cls, metrics: Mapping[str, Iterable[Any]]) -> TrackedMetrics:
        """Names metrics: by themselves, or after their step too if several have one name.

        Args:
            metrics: The metrics of each step, by the name of the step.

        Raises:
            ValueError: Two metrics would have one name in the logs.
        """
        owners: dict[int, tuple[str, Any]] = {}
        for step, found in metrics.items():
            for metric in found:
                owners.setdefault(id(metric), (step, metric))
        names = [metric.name for _, metric in owners.values()]
        named: dict[str, Any] = {}
        for step, metric in owners.values():
            several = names.count(metric.name) > 1 and step
            name = f"{step}_{metric.name}" if several else metric.name
            if name in named:
                raise ValueError(
                    f"Two metrics have one name, so the logs would hold one of them. Received: "
                    f"{name!r} twice. Give one another name: keras.metrics.Mean(name=...)."
                )
            named[name] = metric
        return cls(named)

    def reset(self) -> None:
        """Resets all metrics."""
        for metric in self.metrics.values():
            metric.reset_state()

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [variable for metric in self.metrics.values() for variable in metric.variables]

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""
        return {name: metric.result() for name, metric in self.metrics.items()}


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
    found: EpochMetrics = JoinedMetrics(compiled, TrackedMetrics.of({"": own})) if own else compiled
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
