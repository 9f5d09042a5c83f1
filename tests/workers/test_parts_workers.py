"""Two real workers on batches of parts give what one device gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_parts.py")


def results(printed: str) -> dict[str, Any]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.slow
def test_two_workers_equal_one_device() -> None:
    one = results(run_workers(SCRIPT, 1, timeout=900)[0].output)
    for worker, run in enumerate(run_workers(SCRIPT, workers=2, timeout=900)):
        for case, ours in results(run.output).items():
            where = f"{case} on worker {worker}"
            np.testing.assert_allclose(
                ours["weights"], one[case]["weights"], rtol=0, atol=4e-6, err_msg=where
            )
            assert ours["loss"] == pytest.approx(one[case]["loss"], rel=2e-6), where
            assert ours["verified"] == "same", where
