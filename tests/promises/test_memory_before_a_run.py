"""``plan_memory`` says before a run what TensorFlow's allocator gives out in it."""

from __future__ import annotations

import pytest
from law.memory_functions import measure_memory
from law.processes import pool


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[int, int]]:
    worker = pool().start(TF_CPU_ALLOCATOR_USE_BFC="1")
    pairs: dict[str, tuple[int, int]] = worker.call(measure_memory)
    worker.end()
    return pairs


# Fails if a copy, a state of an owner, or the place of a sharded variable is not counted as it is.
@pytest.mark.parametrize("what", ["copies", "owners", "sharded"])
def test_what_is_kept_is_counted_to_one_percent(
    measured: dict[str, tuple[int, int]], what: str
) -> None:
    planned, given = measured[what]
    assert planned == pytest.approx(given, rel=0.01)


# Fails if a step is said not to fit that does, or if activations are not seen.
def test_a_step_needs_what_it_is_said_to_need_at_least(
    measured: dict[str, tuple[int, int]],
) -> None:
    bound, peak = measured["bound"]
    assert 0.6 * peak <= bound <= peak
