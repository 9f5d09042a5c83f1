"""The job file of docs/how-to/slurm.md on a real Slurm, several jobs at once on one node."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import own_slurm
import pytest
from own_slurm import ask, wait_until

ROOT = Path(__file__).resolve().parents[2]
JOB_FILE = ROOT / "examples" / "schedulers" / "train.sbatch"
LACKING = own_slurm.missing()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=f"a Slurm {LACKING}")]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_slurm.running(tmp_path_factory.mktemp("slurm")):
        yield


class Job:
    """A job of two tasks, in a folder of its own."""

    def __init__(self, folder: Path, mode: str) -> None:
        folder.mkdir()
        program = Path(__file__).with_name("slurm_train.py")
        command = shlex.join([sys.executable, str(program), mode])
        job = JOB_FILE.read_text().replace("python train.py", command)
        (folder / "job").write_text(job.replace("#SBATCH --gpus-per-task=1\n", ""))
        size = ("--nodes=1", "--ntasks-per-node=2")
        place = (f"--chdir={folder}", f"--output={folder}/output")
        self.folder = folder
        self.number = ask("sbatch", "--parsable", *size, *place, str(folder / "job")).strip()
        assert self.number.isdecimal()

    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text() if path.exists() else ""

    def is_at(self, text: str) -> bool:
        return text in self.output()

    def shows(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", ask("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    def has_ended(self) -> bool:
        return self.shows("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


# Fails if a job whose program is broken starts again, if a job that was asked to stop, or was
# requeued, does not, or ends with other bits, or if jobs on one node meet.
def test_what_is_preempted_starts_again_and_what_is_broken_does_not(
    slurm: None, tmp_path: Path
) -> None:
    whole, broken, asked, requeued = (
        Job(tmp_path / name, name if name == "broken" else "whole")
        for name in ("whole", "broken", "asked", "requeued")
    )
    wait_until(lambda: asked.is_at("step 2"), 600.0)
    ask("scancel", "--signal=TERM", asked.number)
    wait_until(lambda: requeued.is_at("step 2"), 600.0)
    ask("scontrol", "requeue", requeued.number)
    for job in (whole, broken, asked, requeued):
        wait_until(job.has_ended, 600.0)

    assert (broken.shows("JobState"), broken.shows("Restarts")) == ("FAILED", "0")
    assert broken.shows("ExitCode") == "1:0"
    assert "a program that is broken" in broken.output()
    with np.load(whole.folder / "weights.npz") as truth:
        for job in (asked, requeued):
            assert (job.shows("JobState"), job.shows("Restarts")) == ("COMPLETED", "1")
            assert "saved step" in job.output()
            with np.load(job.folder / "weights.npz") as weights:
                for name in truth:
                    np.testing.assert_array_equal(weights[name], truth[name])
