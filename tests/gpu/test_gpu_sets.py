"""What the sets of the GPU command run, and what a profile says."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


def test_each_set_names_parts_that_exist(runner: Any) -> None:
    assert list(runner.SETS) == ["a", "b", "c", "d", "e", "g", "h"]
    named = [name for names in runner.SETS.values() for name in names]
    assert set(named) <= set(runner.ORDER)
    assert len(named) == len(set(named))


# One of each kind, and each network that the other rehearsal leaves out.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "contenders"),
    [
        ("profile-transformer-bfloat16-32", {"plain", "ours"}),
        ("2-parts-transformer", {"plain", "ours"}),
        ("bits-transformer", {"1", "2", "4"}),
        ("remat-bfloat16-32", {"plain", "ours", "fit"}),
        ("embedding-float32-256", {"plain", "ours", "fit"}),
    ],
)
def test_a_part_runs_in_a_rehearsal(runner: Any, name: str, contenders: set[str]) -> None:
    (found,) = runner.run_part(name, 500.0, True)
    assert found["status"] == "passed", found
    assert set(found.get("profiles", found.get("per_second", found.get("hashes")))) == contenders


@pytest.mark.slow
def test_without_keras_hub_its_networks_are_not_run(runner: Any) -> None:
    pytest.importorskip("keras")
    if importlib.util.find_spec("keras_hub"):
        pytest.skip("needs an environment without keras_hub")
    (found,) = runner.run_part("bert-bfloat16-32", 500.0, True)
    assert found["status"] == "not run"
    assert "pip install" in found["error"]


def test_the_busy_share_is_that_of_all_streams_together(runner: Any) -> None:
    profiles = importlib.import_module("gpu.profiles")
    found = profiles.busy([(0.0, 2.0), (1.0, 3.0), (5.0, 10.0), (6.0, 7.0)])
    assert found == {"busy_share": 0.8, "ms": 10.0, "longest_gaps_ms": [2.0]}
    assert profiles.busy([])["busy_share"] == 0.0
