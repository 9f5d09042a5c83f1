"""What goes wrong in training and needs a process to itself, raised for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GROWTH = (
    "Memory growth cannot differ between GPU devices. Write tmg.enable_memory_growth(), for all "
    "GPUs, in place of"
)
SAID = {
    "memory_growth_of_one_gpu": ("TfMultiGpuError", GROWTH),
    "memory_growth_of_one_gpu_of_a_worker": ("ClusterError", GROWTH),
    "two_rings_over_different_devices": (
        "StrategyUnavailableError",
        "it aborts both, and whatever else adds so, until the process restarts",
    ),
    "another_backend": ("TfMultiGpuError", 'set os.environ["KERAS_BACKEND"] = "tensorflow"'),
    "out_of_memory": (
        "OutOfMemoryError",
        "Replica 1 (CPU:1) has not enough memory for this step. Received: a global batch of 5 rows",
    ),
}


@pytest.fixture(scope="module")
def raised() -> dict[str, dict[str, str]]:
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("events.py"))],
        env={name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"event"')]
    return {found["event"]: found for found in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize("event", SAID)
def test_each_event_is_an_error_that_says_what_to_do(
    raised: dict[str, dict[str, str]], event: str
) -> None:
    kind, text = SAID[event]
    assert raised[event]["type"] == kind, raised[event]["text"]
    assert text in raised[event]["text"]
