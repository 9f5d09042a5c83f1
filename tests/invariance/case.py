"""What the cases of this folder have in common: a name, what is trained, on what, how exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from law import model

import tfmultigpu as tmg

EXACT = 1e-6
# Seven rows, one (fewer than any number of replicas), two, and sizes that nothing divides.
SIZES = (7, 1, 9, 2, 5)


@dataclasses.dataclass(frozen=True)
class Case:
    """One cell of the table: the same training on one device and on replicas.

    Attributes:
        name: What it shows, in a few words.
        build: Makes what is trained.
        batches: Global batches, arrays.
        reason: Why a tolerance is larger than ``EXACT``; without one it may not be.
        replicas: The numbers of replicas. Three by default: few batches divide by it.
        options: For ``assert_replica_invariant``. Steps of evaluation and prediction have tests of
            their own, and are tried only with ``predict=True``.
    """

    name: str
    build: Callable[[], tmg.testing.Training]
    batches: list[Any]
    reason: str = ""
    replicas: tuple[int, ...] = (3,)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        allowed = [
            self.options.get("tolerance", EXACT),
            *self.options.get("tolerances", {}).values(),
        ]
        assert max(allowed) <= EXACT or self.reason, f"{self.name}: say why {max(allowed):.0e}"

    def hold(self) -> tmg.testing.Difference:
        options = {"predict": False, "replicas": self.replicas, **self.options}
        return tmg.testing.assert_replica_invariant(self.build, self.batches, **options)


def cut(*arrays: Any) -> list[Any]:
    """Batches ``(x, y, ...)`` of these sizes; each array, or dict or tuple of arrays, is cut."""
    return model.cut(arrays, SIZES)
