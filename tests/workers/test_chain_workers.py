"""Steps in turn on two real workers, under fit and beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_chain.py")


@pytest.mark.slow
def test_two_workers_give_what_one_device_gives() -> None:
    runs = [*run_workers(SCRIPT, 1, timeout=900), *run_workers(SCRIPT, workers=2, timeout=900)]
    found = [json.loads(run.output.split("RESULT")[1].splitlines()[0]) for run in runs]
    one, *two = found
    assert one["outcomes"] == [None, None]
    assert list(one["history"]) == ["first_loss", "first_other", "second_loss", "second_other"]
    for worker in two:
        assert worker["outcomes"] == ["same", "same"]
        assert worker["steps"] == one["steps"] == 4
        for name, values in one["history"].items():
            np.testing.assert_allclose(worker["history"][name], values, rtol=1e-4, err_msg=name)
        for own, other in zip(worker["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
