"""The job file of docs/how-to/slurm.md on a real Slurm, three jobs at once on one node."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import own_slurm
import pytest
from own_slurm import ask, wait_until

ROOT = Path(__file__).resolve().parents[2]
JOB_FILE = ROOT / "examples" / "schedulers" / "train.sbatch"
LACKING = own_slurm.missing()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=f"a Slurm {LACKING}")]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[None]:
    with own_slurm.running(tmp_path / "slurm"):
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
        paths = (f"--chdir={folder}", f"--output={folder}/output")
        self.folder = folder
        self.number = ask("sbatch", "--parsable", *size, *paths, str(folder / "job")).strip()
        assert self.number.isdecimal()

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def weights(self) -> bytes:
        return (self.folder / "weights.npz").read_bytes()

    def shows(self, name: str) -> str:
        shown = re.search(rf"\b{name}=(\S+)", ask("scontrol", "show", "job", self.number))
        return shown[1] if shown else ""

    def has_ended(self) -> bool:
        return self.shows("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


# Fails if a job whose program is broken starts again, if a job that was asked to stop does not, or
# ends with other bits than a job that was not, or if jobs on one node meet.
def test_what_is_preempted_starts_again_and_what_is_broken_does_not(
    slurm: None, tmp_path: Path
) -> None:
    stopped, whole, broken = (Job(tmp_path / mode, mode) for mode in ("stopped", "whole", "broken"))
    for job in (broken, whole, stopped):
        wait_until(job.has_ended, 600.0)

    assert (broken.shows("JobState"), broken.shows("Restarts")) == ("FAILED", "0"), broken.output()
    assert broken.shows("ExitCode") == "1:0"
    assert "a program that is broken" in broken.output()
    assert (whole.shows("JobState"), whole.shows("Restarts")) == ("COMPLETED", "0"), whole.output()
    ended = (stopped.shows("JobState"), stopped.shows("Restarts"))
    assert ended == ("COMPLETED", "1"), stopped.output()
    assert "Asked to stop: saved step" in stopped.output()
    assert stopped.weights() == whole.weights()
