"""Two workers of two devices with sharded variables give what one device gives."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfmultigpu.clusters.processes import free_addresses, run_together, worker_environment
from tfmultigpu.testing import run_workers

SCRIPT = Path(__file__).with_name("worker_sharded.py")
pytestmark = pytest.mark.slow

LIKE_ONE_DEVICE = (
    "adam",
    "momentum",
    "parts",
    "clipped",
    "scaled",
    "averaged",
    "some",
    "gradients",
    "fit",
)


def results(printed: str) -> dict[str, Any]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def run(workers: int, *args: str, **environment: str) -> list[dict[str, Any]]:
    ended = run_workers(SCRIPT, workers, args=args, timeout=900, environment=environment)
    return [results(one.output) for one in ended]


def assert_like(
    ours: dict[str, Any], expected: dict[str, Any], where: str, atol: float = 2e-6
) -> None:
    assert ours.keys() == expected.keys(), where
    for name, value in expected.items():
        if name == "verified":
            assert ours[name] == value, where
        elif name == "logs":
            assert ours[name] == pytest.approx(value, abs=atol, rel=2e-6), where
        else:
            np.testing.assert_allclose(
                ours[name], value, rtol=0, atol=atol, err_msg=f"{name}: {where}"
            )


def test_two_workers_of_two_devices_equal_one_device() -> None:
    (one,) = run(1, "train", *LIKE_ONE_DEVICE)
    for worker, found in enumerate(run(2, "train", *LIKE_ONE_DEVICE)):
        for case, ours in found.items():
            assert_like(ours, one[case], f"{case} on worker {worker}")


def test_statistics_of_micro_batches_are_those_of_mirrored_variables() -> None:
    """One device normalizes other micro-batches, so mirrored variables are the comparison."""
    mirrored = run(2, "train", "parts_normalized", MIRRORED="1")
    sharded = run(2, "train", "parts_normalized")
    for worker, (one, other) in enumerate(zip(mirrored, sharded, strict=True)):
        for found in (one, other):  # Mirrored state is counted on each device.
            found["parts_normalized"]["verified"] = None
        assert_like(other["parts_normalized"], one["parts_normalized"], f"worker {worker}")


def test_each_worker_keeps_each_large_variable_once() -> None:
    first, second = run(2, "placed")
    assert first["first"] == second["first"]  # Drawn from other seeds.
    assert first["devices"] == second["devices"] == ["CPU:0", "CPU:1"] * 2
    assert first["later"] == second["later"]
    assert set(first["later"]) == {"CPU:0", "CPU:1"}
    for one in (first, second):
        assert [path.split("/")[-1] for path in one["paths"]] == ["kernel"] * 4
        assert one["large"] == dict.fromkeys(("CPU:0", "CPU:1"), 2 * 4 * 32 * 32)
        assert one["profiled"]
        assert len(set(one["small"].values())) == 1
        assert sum(one["slots"].values()) == 2 * one["trained"]
        assert max(one["slots"].values()) < 1.2 * one["trained"]
        assert "sharded variables     2 on CPU:0, 2 on CPU:1" in one["report"]
        assert "The step computed what one device computes" in one["report"]


def test_a_run_resumes_on_workers_and_on_one_device(tmp_path: Path) -> None:
    (whole,) = run(1, "resume", str(tmp_path / "whole"), "0")
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    run(2, "resume", there, "2")
    assert_like(run(1, "resume", there, "0")[0], whole, "from workers to one device")
    run(1, "resume", back, "2")
    run(2, "resume", back, "4", MIRRORED="1")
    for worker, ours in enumerate(run(2, "resume", back, "0")):
        assert_like(ours, whole, f"from one device to worker {worker}")


def test_gradients_travel_in_a_narrow_dtype() -> None:
    (one,) = run(1, "train", "narrow")
    for worker, found in enumerate(run(2, "train", "narrow")):
        ours = {**found["narrow"], "verified": "same"}
        # bfloat16 has 8 bits; a sum that is wrong by a factor would be off by 0.1 and more.
        assert_like(ours, one["narrow"], f"worker {worker}", atol=1e-2)


def test_a_worker_with_one_device_keeps_all() -> None:
    mirrored = run(2, "train", "momentum", LOCAL_DEVICES="1", MIRRORED="1")
    assert run(2, "train", "momentum", LOCAL_DEVICES="1") == mirrored


def test_mirrored_variables_of_workers_can_be_updated_by_owners() -> None:
    (one,) = run(1, "train", "owners")
    for worker, ours in enumerate(run(2, "train", "owners", MIRRORED="1")):
        assert_like(ours["owners"], one["owners"], f"worker {worker}")


def together(*args: str) -> tuple[tuple[int | None, ...], list[str]]:
    addresses = free_addresses(2)
    printed: list[list[str]] = [[], []]
    outcome = run_together(
        [[sys.executable, str(SCRIPT), *args]] * 2,
        [worker_environment(addresses, index, os.environ) for index in range(2)],
        lambda index, line: printed[index].append(line.decode()),
        timeout=900.0,
        grace=600.0,
    )
    return outcome.codes, ["".join(one) for one in printed]


def test_a_lost_worker_is_an_error() -> None:
    codes, printed = together("lost")
    assert codes == (0, -9), printed
    found = results(printed[0])
    assert found.keys() == {"step", "creation"}
    for kind, seconds, text in found.values():
        assert kind == "WorkerLostError", text
        assert "First to go: worker 1 of 2" in text
        # The promise is a minute; a machine may be five times as slow.
        assert seconds < 5 * 60.0


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("widths", "another shape on worker"),
        ("number", "were elsewhere"),
        ("limits", "at_least=[0, 8], by worker"),
    ],
)
def test_workers_that_differ_are_an_error(what: str, says: str) -> None:
    codes, printed = together("different", what)
    assert codes == (0, 0), printed
    for one in printed:
        ((kind, _, text),) = results(one).values()
        assert kind == "WorkersDifferError", text
        assert says in text
