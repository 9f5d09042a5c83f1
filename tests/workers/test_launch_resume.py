"""Workers are killed, the launcher starts all again, and the run ends as if it had not happened."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tfmultigpu.addons.workers.launcher import launch
from tfmultigpu.addons.workers.processes import run_together

SCRIPT = str(Path(__file__).with_name("worker_resume.py"))


def in_slurm(folder: Path) -> str:
    """Returns what two tasks print that find each other by the variables of `srun`."""
    step = {
        "SLURM_JOB_ID": f"{os.getpid()}",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    shared = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | step
    lines: list[bytes] = []
    outcome = run_together(
        [[sys.executable, SCRIPT, str(folder)]] * 2,
        [{**shared, "SLURM_PROCID": f"{task}"} for task in range(2)],
        lambda task, line: lines.append(line),
        timeout=900.0,
    )
    printed = b"".join(lines).decode()
    assert outcome.codes == (0, 0), printed
    return printed


@pytest.mark.slow
def test_workers_that_get_a_signal_resume_to_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The chief is killed; then the other one gets SIGTERM."""
    deaths = [f"0@5@{signal.SIGKILL:d}", f"1@8@{signal.SIGTERM:d}"]
    # Long enough for TensorFlow's heartbeats, so that the other worker ends by itself.
    arguments = [str(tmp_path / "killed"), *deaths]
    code = launch(SCRIPT, arguments, workers=2, restarts=2, grace=40.0)
    out, err = capfd.readouterr()
    assert code == 0, f"{err}{out}"

    assert "Worker 0 of 2 was ended by SIGKILL, the first to fail" in err
    assert "restart 1 of 2" in err
    (line,) = re.findall(r"^\[1\] tfmultigpu.errors.WorkerLostError: (.*)$", out, re.MULTILINE)
    assert line.startswith("Another worker is gone, and the")
    assert "First to go: worker 0 of 2 at 127.0.0.1:" in line
    assert "its connection broke off without a message: it was killed" in line

    # Both save the same step and end with 143; who is first to end is chance.
    assert re.search(r"Worker [01] of 2 ended with code 143, the first to fail", err)
    assert "restart 2 of 2" in err
    asked = re.findall(r"\[([01])\].*Asked to stop: saved step (\d+) to .*, exit 143", out)
    assert sorted(worker for worker, _ in asked) == ["0", "1"]
    (saved,) = {int(step) for _, step in asked}
    assert 8 <= saved <= 8 + 3

    begun = re.findall(r"\[0\] BEGINS (.*)", out)
    assert begun == ["0 None", "1 3", f"2 {saved}"]  # Saved after each third step.

    expected = re.findall("RESULT (.*)", in_slurm(tmp_path / "whole"))
    assert len(expected) == 2
    assert re.findall("RESULT (.*)", out) == expected
