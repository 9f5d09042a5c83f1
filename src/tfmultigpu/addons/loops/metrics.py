"""Metrics in the logs of an epoch: reset before it, and read after it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras


@dataclasses.dataclass(frozen=True)
class EpochMetrics:
    """The metrics that a step updates.

    Attributes:
        own: Metrics that the step or the model updates itself, by the names in the logs.
        container: Keras' compiled metrics, or None; their results count if a name occurs twice.
    """

    own: Mapping[str, Any]
    container: Any = None

    @classmethod
    def of(cls, metrics: Mapping[str, Iterable[Any]]) -> EpochMetrics:
        """Names the metrics of each step; after the step, too, if several have one name."""
        owners: dict[int, tuple[str, Any]] = {}
        for step, updated in metrics.items():
            for metric in updated:
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

    @property
    def variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [variable for owner in self._owners for variable in owner.variables]

    @property
    def _owners(self) -> list[Any]:
        return [*([] if self.container is None else [self.container]), *self.own.values()]

    def reset(self) -> None:
        """Resets all metrics; not traced: some create their variables in their first update."""
        for owner in self._owners:
            owner.reset_state()

    def results(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""
        own = {name: metric.result() for name, metric in self.own.items()}
        return own if self.container is None else {**own, **self._results()}

    @functools.cached_property
    def _results(self) -> Callable[[], Any]:
        """The results of compiled metrics in one call, which is faster."""
        if not all(is_part_of_keras(type(metric)) for metric in self.container.metrics):
            return self.container.result  # type: ignore[no-any-return]
        traced: Any = tf.function(lambda: self.container.result(), autograph=False)
        # TensorFlow would take the functions of several models for one that it traces anew.
        concrete: Callable[[], Any] = traced.get_concrete_function()
        return concrete


def metrics_that_assign(models: Iterable[Any], assigned: Iterable[Any]) -> list[Any]:
    """Returns the metrics of models that have a variable which a forward pass assigns."""
    changed = {id(variable) for variable in assigned}
    metrics = {id(m): m for model in models for m in getattr(model, "metrics", ())}
    return [m for m in metrics.values() if any(id(v) in changed for v in m.variables)]
