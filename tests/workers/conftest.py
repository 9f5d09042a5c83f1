"""Two workers that have joined and stay, for all files here; their processes are those of law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import this_worker
from law import worker_functions


@pytest.fixture(scope="session")
def both() -> Iterator[Callable[..., list[Any]]]:
    """Calls a function on both workers at once and returns what each returned."""
    yield from this_worker.pair_of(worker_functions.join, replicas=2)
