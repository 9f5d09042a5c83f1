"""Losses over the whole batch on two real workers, many batches of different sizes in a call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_gathering.py")


@pytest.mark.slow
def test_two_workers_give_what_one_device_gives() -> None:
    runs = [*run_workers(SCRIPT, 1, timeout=900), *run_workers(SCRIPT, workers=2, timeout=900)]
    one, *two = [json.loads(run.output.split("RESULT")[1].splitlines()[0]) for run in runs]
    assert one[0]["steps"] == one[1]["steps"] == 6
    for worker in two:
        for logs, expected in zip(worker, one, strict=True):
            assert logs == pytest.approx(expected, rel=1e-5)
