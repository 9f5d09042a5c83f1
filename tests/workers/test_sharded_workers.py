"""Two workers of two devices with sharded variables give what one device gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfmultigpu.addons.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_sharded.py")
pytestmark = pytest.mark.slow

LIKE_ONE_DEVICE = ("parts", "scaled", "some", "fit")


def results(printed: str) -> list[dict[str, Any]]:
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def workers(folder: Path) -> list[dict[str, Any]]:
    """What each of two workers found."""
    runs = run_workers(SCRIPT, 2, args=[folder], timeout=900)
    return [results(run.output)[0] for run in runs]


@pytest.fixture(scope="module")
def one(folder: Path, workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What one device gives; it also resumes what the workers have begun."""
    (ended,) = run_workers(SCRIPT, 1, args=[folder], timeout=600)
    (found,) = results(ended.output)
    return found


def assert_like(ours: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert ours.keys() == expected.keys(), where
    for name, value in expected.items():
        if name == "verified":
            assert ours[name] == value, where
        elif name == "logs":
            assert ours[name] == pytest.approx(value, abs=2e-6, rel=2e-6), where
        else:
            np.testing.assert_allclose(
                ours[name], value, rtol=0, atol=2e-6, err_msg=f"{name}: {where}"
            )


def test_two_workers_of_two_devices_equal_one_device(
    workers: list[dict[str, Any]], one: dict[str, Any]
) -> None:
    for worker, found in enumerate(workers):
        for case in LIKE_ONE_DEVICE:
            assert_like(found[case], one[case], f"{case} on worker {worker}")


def test_a_run_of_workers_resumes_on_one_device(one: dict[str, Any]) -> None:
    assert_like(one["resumed"], one["whole"], "from workers to one device")


def test_each_worker_keeps_each_large_variable_once(workers: list[dict[str, Any]]) -> None:
    first, second = (found["placed"] for found in workers)
    assert first["first"] == second["first"]  # Drawn from other seeds.
    assert first["devices"] == second["devices"] == ["CPU:0", "CPU:1"] * 2
    assert first["later"] == second["later"]
    assert set(first["later"]) == {"CPU:0", "CPU:1"}
    for one in (first, second):
        assert [path.split("/")[-1] for path in one["paths"]] == ["kernel"] * 4
        assert one["large"] == dict.fromkeys(("CPU:0", "CPU:1"), 2 * 4 * 32 * 32)
        assert len(set(one["small"].values())) == 1
        assert sum(one["slots"].values()) == 2 * one["trained"]
        assert max(one["slots"].values()) < 1.2 * one["trained"]
        assert " error" not in one["report"].splitlines()[0], one["report"]


def test_workers_that_differ_are_an_error(workers: list[dict[str, Any]]) -> None:
    for found in workers:
        for what, says in (
            ("widths", "another shape on worker"),
            ("number", "do not call the same things in the same order"),
            ("limits", "at_least=[0, 8], by worker"),
        ):
            kind, text = found["different"][what]
            assert kind == "ClusterError", text
            assert says in text
