"""Two real workers fit as one device does, and each of them has everything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_fit.py")


def results(printed: str) -> dict[str, dict]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.slow
def test_two_workers_give_what_one_device_gives() -> None:
    outputs = [run.output for run in [*run_workers(SCRIPT, 1), *run_workers(SCRIPT, workers=2)]]
    one, *two = [results(output) for output in outputs]
    assert two[0] == two[1]
    assert ["Epoch 6/6" in output for output in outputs] == [True, True, False]
    for name in ("shuffled", "watched", "stopped"):
        found, expected = two[0][name], one[name]
        assert found["steps"] == expected["steps"]
        assert list(found["history"]) == list(expected["history"])
        for key, values in expected["history"].items():
            np.testing.assert_allclose(
                found["history"][key], values, rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}"
            )
        for weight, other in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(two[0]["watched"]["batches"], one["watched"]["batches"], rtol=1e-5)
    assert len(one["watched"]["batches"]) == 2 * 6
    assert two[0]["stopped"]["epochs"] == one["stopped"]["epochs"] == [0, 1]
    assert two[0]["without a seed"]["rows"] == one["without a seed"]["rows"] == 31
