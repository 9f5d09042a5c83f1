"""A training that is killed at any moment ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_training.py")


@pytest.mark.slow
def test_killed_twice_and_stopped_once_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    killed, in_a_save, stopped, finished = result["often"]
    # Killed after step 5: what was saved after step 4 is there.
    assert killed == {"code": -9, "left": ["step-00000002.npz", "step-00000004.npz"]}
    # Killed while it wrote step 10: half of it lies there, under a hidden name.
    saved = [f"step-0000000{step}.npz" for step in (4, 6, 8)]
    assert in_a_save == {"code": -9, "left": [".step-00000010.npz", *saved]}
    # Asked to stop before step 16: saved after it.
    assert stopped == {"code": 143, "left": [f"step-000000{step}.npz" for step in (12, 14, 16)]}
    assert finished["code"] == result["whole"]["code"] == 0
    assert result["names"][0] == result["names"][1] == len(result["equal"]) > 20
    assert all(result["equal"])
