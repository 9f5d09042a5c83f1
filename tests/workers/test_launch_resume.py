"""Workers are killed, the launcher starts all again, and the run ends as if it had not happened."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tfmultigpu.clusters import launcher as launch_module
from tfmultigpu.clusters.launcher import launch
from tfmultigpu.clusters.processes import run_together

SCRIPT = Path(__file__).with_name("worker_resume.py")


def results(text: str) -> list[str]:
    return [line.split("RESULT ")[1] for line in text.splitlines() if "RESULT " in line]


def undisturbed_in_slurm(folder: Path) -> str:
    """What two tasks print that find each other by the variables of `srun`."""
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
        [[sys.executable, str(SCRIPT), str(folder)]] * 2,
        [{**shared, "SLURM_PROCID": f"{task}"} for task in range(2)],
        lambda task, line: lines.append(line),
        timeout=900.0,
    )
    printed = b"".join(lines).decode()
    assert outcome.codes == (0, 0), printed
    return printed


@pytest.mark.slow
def test_workers_that_get_a_signal_resume_to_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is not the chief is killed, then the chief; then one of them gets SIGTERM."""
    rng = np.random.default_rng()
    steps = sorted(int(one) for one in rng.choice(np.arange(1, 15), 2, replace=False))
    steps.append(steps[-1] // 3 * 3 + 1)
    where = f"signals before steps {steps}"
    # Long enough for TensorFlow's heartbeats, so that the other worker ends by itself.
    monkeypatch.setattr(launch_module, "_GRACE", 40.0)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    signals = (1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGTERM)
    deaths = [f"{w}@{step}@{int(n)}" for step, (w, n) in zip(steps, signals, strict=True)]
    code = launch(str(SCRIPT), [str(killed), *deaths], workers=2, restarts=3, devices_per_worker=0)
    out, err = capfd.readouterr()
    assert code == 0, f"{where}:\n{err}{out}"

    for attempt, (dead, other) in enumerate([(1, 0), (0, 1)]):
        assert f"Worker {dead} of 2 was ended by SIGKILL, the first to fail" in err, where
        assert f"restart {attempt + 1} of 3" in err
        lost = f"[{other}] tfmultigpu.errors.WorkerLostError: Another worker is gone, and the"
        (line,) = [line for line in out.splitlines() if line.startswith(lost)]
        assert f"First to go: worker {dead} of 2 at 127.0.0.1:" in line
        assert "its connection broke off without a message: it was killed" in line

    # Both save the same step and end with 143; who is first to end is chance.
    assert re.search(r"Worker [01] of 2 ended with code 143, the first to fail", err), where
    assert "restart 3 of 3" in err
    asked = re.findall(r"\[([01])\].*Asked to stop: saved step (\d+) to .*, exiting with 143", out)
    assert sorted(worker for worker, _ in asked) == ["0", "1"], where
    (saved,) = {int(step) for _, step in asked}
    assert steps[2] <= saved <= steps[2] + 3

    expected = [*(step // 3 * 3 or None for step in steps[:2]), saved]
    first_steps = [line.split() for line in (killed / "first steps").read_text().splitlines()]
    begun = [restored for _, restored, _ in first_steps]
    assert begun == ["None", *(f"{one}" for one in expected)], where
    seconds = float(first_steps[2][2]) - float((killed / "death 1").read_text())
    print(f"from the death of the chief to the next step: {seconds:.1f} s")
    # The promise is a minute; a machine may be five times as slow.
    assert seconds < 5 * 60.0

    reference = results(undisturbed_in_slurm(whole))
    assert len(reference) == 2
    assert results(out) == reference, where
