"""Two real workers: gone on with to the bit, directories that are not shared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.addons.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_checkpoints.py")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def results(shared: Path) -> list[dict[str, Any]]:
    found = []
    for run in run_workers(SCRIPT, workers=2, args=[shared], timeout=900):
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
def test_one_process_goes_on_from_the_checkpoint_of_two_workers(
    shared: Path, results: list[dict[str, Any]]
) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    assert tmg.Checkpoints(shared / "b", model, optimizer).restore() == 8
    copies = strategy.experimental_local_results(model.variables[3].value)
    expected = np.array([result["statistics"] for result in results], "float32")
    assert (expected[0] != expected[1]).any()
    found = np.stack([one.numpy() for one in copies])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_directories_that_cannot_be_saved_to_are_an_error_on_both(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert "different checkpoints in " in result["restore"]
        assert re.search(r"step of each worker: \[\d+, -1\]\. Give", result["restore"])
        assert result["unchanged"]
    assert "The chief cannot write to" in results[0]["failed"]
    assert "Not a directory" in results[0]["failed"]
    assert "see the output of the chief" in results[1]["failed"]


@pytest.mark.slow
def test_a_run_that_a_callback_ended_is_over_on_both(results: list[dict[str, Any]]) -> None:
    epochs, _ = results[0]["ended"]
    assert 1 <= len(epochs) < 5
    for result in results:
        # The second worker has fewer callbacks than were saved.
        assert result["ended again"] == result["ended"]
        assert result["ended"][0] == epochs
