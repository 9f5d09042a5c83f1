"""docs/how-to/ray.md on a real Ray of this machine: nodes come and go, the bits stay."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LACKING = importlib.util.find_spec("ray") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LACKING, reason="needs Ray: nox -s ray, or pip install 'ray[train]'"),
]

# What happens, and with how many workers it starts each time, from which step.
EVENTS = {
    "killed": [[2, 1], [2, 5]],
    "removed and added": [[2, 1], [1, 5], [2, 9]],
    "by hand": [[2, 1], [1, 5]],
    "two of four": [[4, 1], [2, 5]],
}
OTHERS = ("one", "by hand on one", "no failure allowed", "replaced")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each event gave; all of them happen on one cluster."""
    folder = tmp_path_factory.mktemp("ray")
    paths = (HERE, ROOT / "examples" / "schedulers", *os.environ.get("PYTHONPATH", "").split(":"))
    environment = {
        "PYTHONPATH": ":".join(map(str, paths)),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    }
    with (folder / "output").open("wb") as output:
        ended = subprocess.run(
            [sys.executable, str(HERE / "own_ray.py"), str(folder), *OTHERS, *EVENTS],
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            timeout=3600,  # A quarter of an hour on an idle machine.
            check=False,
        )
    printed = (folder / "output").read_text(errors="replace")
    assert ended.returncode == 0, printed[-20_000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    print(json.dumps(found, indent=1))
    return found


# Fails if a run ends with other bits than on one device, or reports an epoch twice or never.
@pytest.mark.parametrize("event", EVENTS)
def test_the_run_ends_as_on_one_device(results: dict[str, Any], event: str) -> None:
    expected = results["by hand on one" if event == "by hand" else "one"]
    found = results[event]
    assert found["error"] == expected["error"] == ""
    assert [start[:2] for start in found["starts"]] == EVENTS[event]
    assert set(found["digests"]) == set(expected["digests"])
    assert found["epochs"] == expected["epochs"] == [0, 1, 2, 3]
    assert found["losses"] == expected["losses"]


# Fails if a node that joins while another is lost disturbs the run.
def test_a_node_is_replaced(results: dict[str, Any]) -> None:
    found = results["replaced"]
    assert found["error"] == ""
    assert found["starts"][0][:2] == [2, 1]
    assert found["starts"][-1][0] == 2
    assert set(found["digests"]) == set(results["one"]["digests"])
    assert found["epochs"] == [0, 1, 2, 3]


# Fails if the program hides from Ray that a worker was lost.
def test_no_failure_is_allowed(results: dict[str, Any]) -> None:
    found = results["no failure allowed"]
    assert "WorkerGroupError" in found["error"] or "TrainingFailedError" in found["error"]
    assert len(found["starts"]) == 1
