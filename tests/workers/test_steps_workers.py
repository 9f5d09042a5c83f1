"""Two real workers give what one device gives: weights, logs, metrics, predictions, counters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_training.py")


def results(printed: str) -> dict[str, dict]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.slow
def test_two_workers_equal_one_device() -> None:
    one = results(run_workers(SCRIPT, 1, timeout=900)[0].output)
    for worker, run in enumerate(run_workers(SCRIPT, workers=2, timeout=900)):
        for case, ours in results(run.output).items():
            expected = one[case]
            where = f"{case} on worker {worker}"
            assert ours["iterations"] == expected["iterations"], where
            for name in ("weights", "predictions"):
                np.testing.assert_allclose(
                    ours[name], expected[name], rtol=0, atol=2e-6, err_msg=f"{name}: {where}"
                )
            for name in ("accuracy", "evaluated"):
                assert ours[name] == pytest.approx(expected[name], abs=1e-6), where
            assert ours["logs"] == pytest.approx(expected["logs"], abs=2e-6, rel=2e-6), where
