"""Two real workers: gone on with to the bit, stopped together, directories that are not shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_checkpoints.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("shared")
    found = []
    for run in run_workers(SCRIPT, workers=2, args=[directory], timeout=240):
        lines = [line for line in run.output.splitlines() if line.startswith("RESULT ")]
        merged: dict[str, Any] = {}
        for line in lines:
            merged |= json.loads(line.removeprefix("RESULT "))
        found.append(merged)
    return found


@pytest.mark.slow
def test_a_run_gone_on_with_equals_one_uninterrupted_on_each_worker(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["gone on"] == [8, 18]
        assert result["state"] == result["uninterrupted"]
    # The statistics of each worker are its own, and come back to it.
    assert results[0]["state"] != results[1]["state"]


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_both_after_the_same_step(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["code"] == 143
        assert len(result["saved"]) == 1
        assert result["saved"] == results[0]["saved"]
        assert result["seconds to stop"] < 30


@pytest.mark.slow
def test_a_directory_that_is_not_shared_is_an_error_on_both(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "workers [1] do not see it" in result["save"]
        assert "would go on from different weights. Received: worker 0: step " in result["restore"]
        assert "; worker 1: nothing. The directory is not shared" in result["restore"]
        assert result["unchanged"]
        assert result["seconds to save"] < 10
        assert result["seconds to restore"] < 10


@pytest.mark.slow
def test_all_workers_hear_of_a_write_that_failed(results: list[dict[str, Any]]) -> None:
    assert "could not be written" in results[0]["failed"]
    assert "Not a directory" in results[0]["failed"]
    assert "on the first worker: see what that worker says" in results[1]["failed"]
