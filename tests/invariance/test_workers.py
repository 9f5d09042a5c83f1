"""Two worker processes give what one device gives: the cases of this folder once more."""

from __future__ import annotations

import functools

import pytest
from worker_cases import run, worker_cases

from tfmultigpu.testing import run_workers

NAMES = sorted(worker_cases())


@functools.cache
def outcomes() -> list[dict[str, str]]:
    """One pair of processes for all cases: starting TensorFlow takes longer than a case."""
    return [result.value for result in run_workers(run, 2, args=[NAMES], timeout=1500)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_workers_give_what_one_device_gives(name: str) -> None:
    for worker, outcome in enumerate(outcomes()):
        assert not outcome[name], f"worker {worker}:\n{outcome[name]}"
