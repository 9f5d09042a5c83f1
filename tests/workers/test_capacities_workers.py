"""Unequal machines: three real workers, one device each, agree on capacities."""

from __future__ import annotations

import pytest
import worker_capacities
from worker_capacities import GIB

from tfmultigpu.addons.testing import run_workers


@pytest.mark.slow
def test_workers_of_unequal_memory_and_speed() -> None:
    # A machine of two devices and a machine of one are three workers.
    found = [one.value for one in run_workers(worker_capacities.everything, 3, timeout=900.0)]
    for worker, seen in enumerate(found):
        assert seen["memory"] == (2 * GIB + 1, 3 * GIB + 1, 4 * GIB + 1)  # to the byte
        says = "memory={'CPU:0': -1}" if worker == 1 else "memory of its replicas [1]"
        assert says in seen["unknown"]
        assert seen["speeds"] == found[0]["speeds"]
    # Each sleeps four times as long a row as the one before, and never shorter than asked for.
    assert found[0]["speeds"][0] > found[0]["speeds"][1] > found[0]["speeds"][2]
