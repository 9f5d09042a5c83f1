"""Both ways to add over replicas, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tfmultigpu.strategies import collectives


@contextmanager
def forcing_addition(way: Literal["in memory", "collective"]) -> Iterator[None]:
    """Forces one way to add for all steps that are traced inside the context."""
    before, collectives._forced = collectives._forced, way == "in memory"
    try:
        yield
    finally:
        collectives._forced = before
