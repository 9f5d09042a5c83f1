"""The job file of docs/how-to/slurm.md on a real Slurm, all jobs at once on one node."""

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
    """A job, in a folder of its own; of two tasks if ``options`` do not say otherwise."""

    def __init__(self, folder: Path, mode: str, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        program = Path(__file__).with_name("slurm_train.py")
        command = shlex.join([sys.executable, str(program), mode])
        job = JOB_FILE.read_text().replace("python train.py", command)
        (folder / "job").write_text(job.replace("#SBATCH --gpus-per-task=1\n", ""))
        size = ("--nodes=1", "--ntasks-per-node=2")
        paths = (f"--chdir={folder}", f"--output={folder}/output")
        self.folder = folder
        submit = ("sbatch", "--parsable", *size, *options, *paths, str(folder / "job"))
        self.number = ask(*submit).strip()
        assert self.number.isdecimal()

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def weights(self, name: str = "weights") -> bytes:
        return (self.folder / f"{name}.npz").read_bytes()

    def shows(self, name: str) -> str:
        return self._all(name)[0]

    def _all(self, name: str) -> list[str]:
        """Returns what Slurm shows, of each job of an array."""
        return re.findall(rf"\b{name}=(\S+)", ask("scontrol", "show", "job", self.number)) or [""]

    def has_ended(self) -> bool:
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
        return ends >= {*self._all("JobState")}

    def ended(self) -> tuple[str, str, str]:
        """Waits for the end; returns the state, the number of restarts and the exit code."""
        wait_until(self.has_ended, 600.0)
        return self.shows("JobState"), self.shows("Restarts"), self.shows("ExitCode")


def change(job: Job, *values: str) -> None:
    assert not ask("scontrol", "update", f"JobId={job.number}", *values)


# Fails if a job whose program is broken starts again, if a job that Slurm or a signal stopped does
# not, or ends with other bits than a job that was left alone, or if jobs on one node meet.
def test_what_is_stopped_starts_again_and_what_is_broken_does_not(
    slurm: None, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    # Slurm looks at the time of a job twice a minute, and has to give the next start more of it.
    late = Job(tmp_path / "late", "late", "--time=2")
    wait_until(lambda: late.shows("Restarts") == "1", 300.0)
    change(late, "TimeLimit=30")
    modes = ("smaller", "stopped", "requeued", "killed", "whole", "broken")
    jobs = {mode: Job(tmp_path / mode, mode) for mode in modes} | {"late": late}
    array = Job(tmp_path / "array", "array", "--array=3,5")

    ended = jobs["broken"].ended()
    assert ended == ("FAILED", "0", "1:0"), jobs["broken"].output()
    assert "a program that is broken" in jobs["broken"].output()
    assert jobs["whole"].ended() == ("COMPLETED", "0", "0:0"), jobs["whole"].output()
    expected = jobs["whole"].weights()

    # A job that is held after its save, in whose folder another one of one task goes on.
    wait_until(lambda: "held" in jobs["smaller"].shows("Reason"), 300.0)
    ask("scancel", jobs["smaller"].number)
    smaller = Job(tmp_path / "smaller", "whole", "--ntasks-per-node=1")

    for mode, restored in (
        ("stopped", r"[345]"),
        ("requeued", r"[345]"),
        ("killed", "5"),
        ("late", r"\d+"),
    ):
        with subtests.test(mode=mode):
            job = jobs[mode]
            assert job.ended() == ("COMPLETED", "1", "0:0"), job.output()
            assert job.weights() == expected
            assert re.search(rf"restored {restored}\n", job.output()), job.output()
    assert "Asked to stop: saved step" in jobs["stopped"].output()
    assert smaller.ended() == ("COMPLETED", "0", "0:0"), smaller.output()
    assert re.search(r"tasks 1\n(.*\n)*.*restored [345]\n", smaller.output()), smaller.output()
    assert smaller.weights() == expected
    assert array.ended() == ("COMPLETED", "0", "0:0"), array.output()
    assert array.weights("weights3") == array.weights("weights5") == expected
