"""A worker is killed: whatever the other one computes then says which."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tfmultigpu.addons.workers.processes import free_addresses, run_together, worker_environment

SCRIPT = Path(__file__).with_name("worker_lost.py")
CALLS = (
    "step",
    "step.run",
    "eval step",
    "predict step",
    "evaluate",
    "predict",
    "fit",
    "accumulator",
    "gather",
    "checkpoint",
)


@pytest.mark.slow
def test_every_way_to_compute_names_the_lost_worker(tmp_path: Path) -> None:
    addresses = free_addresses(2)
    printed: list[list[str]] = [[], []]
    outcome = run_together(
        [[sys.executable, str(SCRIPT), str(tmp_path)]] * 2,
        [worker_environment(addresses, index, os.environ) for index in range(2)],
        lambda index, line: printed[index].append(line.decode()),
        timeout=600.0,
        grace=300.0,
    )
    output = "".join(printed[0])
    assert outcome.codes == (0, -9), output + "".join(printed[1])
    lines = {line.split(": ")[0]: line for line in printed[0]}
    for call in CALLS:
        kind, text = lines[call].split(": ", 1)[1].split(" ", 1)
        assert kind == "WorkerLostError", lines[call]
        assert f"First to go: worker 1 of 2 at {addresses[1]}: its connection broke" in text, text
