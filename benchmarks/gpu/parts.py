"""Processes of their own for groups of checks and cases: one that dies or hangs costs its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.cases import CASES

__all__ = ["GROUPS", "Ended", "missing", "python", "run_part", "watched"]

BENCHMARKS = Path(__file__).resolve().parents[1]
CHECKS = BENCHMARKS.parent / "tests" / "gpu"
GROUPS = ("two_parts", "growth", "limit", "four_parts")
AT_MOST = 300.0  # seconds of one process
WITHOUT_A_WORD = 150.0  # seconds of one check, or of one contender until it trains
AT_LEAST = 25.0  # starting TensorFlow on a GPU and tracing a network
SAID = 1500  # characters of what a process said last


def run_part(
    name: str, seconds: float, rehearse: bool, log: Path | None = None
) -> list[dict[str, Any]]:
    """Runs a group of checks or a case, in a process of its own.

    Where a check ends its process, the checks after it run in another one.

    Args:
        name: One of ``GROUPS`` or ``CASES``.
        seconds: How long it may take.
        rehearse: On virtual CPUs.
        log: Where to add all that a process said which did not end well.

    Returns:
        The records it wrote, and one for each check that it did not come to.
    """
    if seconds < AT_LEAST:
        return missing(name, [], "not run", "no time was left: give more --minutes")
    end = time.monotonic() + min(seconds, AT_MOST)
    found: list[dict[str, Any]] = []
    left: list[str] = []
    while True:
        ended = watched(_command(name, rehearse, left), end - time.monotonic())
        found += [one for one in ended.lines if not (found and "expected" in one)]
        if ended.problem and log is not None:
            with contextlib.suppress(OSError), log.open("a") as file:
                file.write(f"==== {name}: {ended.problem}\n{ended.said}\n")
        done = {one["name"] for one in found if "name" in one}
        begun = [one["begun"] for one in ended.lines if "begun" in one]
        all_of_it = next((one["expected"] for one in found if "expected" in one), [])
        ended_it = begun[-1] if begun and begun[-1] not in done else None
        left = [one for one in all_of_it if one not in done and one != ended_it]
        problem = ended.problem or "ended before it came to this"
        # The problem last: that line is what a short list shows.
        error = f"{ended.said[-SAID:].strip()}\n{problem}".strip()
        if name in CASES or not left or ended_it is None:
            return missing(name, found, "failed", error)
        found += missing(name, [{"expected": [ended_it]}], "failed", error)
        if end - time.monotonic() < AT_LEAST:
            why = f"no time was left after {ended_it}, which {problem}: give more --minutes"
            return missing(name, found, "not run", why)


def missing(
    name: str, found: list[dict[str, Any]], status: str, error: str
) -> list[dict[str, Any]]:
    """Returns the records of a part: those it wrote, and one for each check it did not come to.

    Args:
        name: One of ``GROUPS`` or ``CASES``.
        found: What it wrote; a group begins with what it was going to run.
        status: Of what is missing.
        error: Why it is missing.
    """
    wrote = [one for one in found if "name" in one and "status" in one]
    if name in CASES:
        # As far as it came, where it came to nothing else.
        far = [one["so_far"] for one in found if "so_far" in one][-1:]
        at = "".join(f", at {one['begun']}" for one in found[-1:] if "begun" in one)
        kind = CASES[name].kind
        unfinished = {"name": name, "kind": kind, "status": status, "error": f"{error}{at}"}
        return wrote or [{**(far[0] if far else {}), **unfinished}]
    expected = next((one["expected"] for one in found if "expected" in one), [name])
    there = {one["name"] for one in wrote}
    empty = {"status": status, "seconds": 0.0, "facts": {}, "error": error}
    return wrote + [{"name": one, **empty} for one in expected if one not in there]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that ended or was ended.

    Attributes:
        lines: What it wrote, JSON objects.
        problem: How it ended, where not as it should; else empty.
        said: Its output and errors, together.
    """

    lines: list[dict[str, Any]]
    problem: str
    said: str


def watched(command: list[str], seconds: float, silent: float = WITHOUT_A_WORD) -> Ended:
    """Runs a command that writes lines of JSON to the file that takes the place of ``LINES``.

    Args:
        command: The command.
        seconds: After which it is ended.
        silent: Seconds without a new line after which it is ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder) / "lines", Path(folder) / "output"
        lines.touch()
        filled = [str(lines) if part == "LINES" else part for part in command]
        with output.open("w") as file:
            process = subprocess.Popen(
                filled,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            problem = _wait(process, lines, seconds, silent)
        finally:
            _end(process)
        found, broken = _read(lines)
        if broken and not problem:
            problem = f"wrote lines that are no JSON, such as {broken[0][:80]!r}"
        return Ended(found, problem, output.read_text(errors="replace"))


def _wait(process: subprocess.Popen[bytes], lines: Path, seconds: float, silent: float) -> str:
    began = heard = time.monotonic()
    size = 0
    while process.poll() is None:
        now, grown = time.monotonic(), lines.stat().st_size
        if grown != size:
            size, heard = grown, now
        if now - began > seconds:
            return f"took longer than {seconds:.0f} s"
        if now - heard > silent:
            return f"wrote nothing for {silent:.0f} s"
        time.sleep(0.1)
    return "" if process.returncode in (0, 1) else f"ended with {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all it started; one that hangs in the driver is left behind."""
    running = process.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        time.sleep(1)  # The driver takes the memory back after the process has gone.


def _read(lines: Path) -> tuple[list[dict[str, Any]], list[str]]:
    found, broken = [], []
    for line in lines.read_text(errors="replace").splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            one = None
        if isinstance(one, dict):
            found.append(one)
        else:
            broken.append(line)
    return found, broken


def _command(name: str, rehearse: bool, left: list[str]) -> list[str]:
    options = ["--rehearse"] if rehearse else []
    if name in GROUPS:
        only = ["--only", *left] if left else []
        return [*python(), str(CHECKS / "run.py"), name, "LINES", *options, *only]
    return [*python(), str(BENCHMARKS / "run_gpu.py"), "--case", name, "LINES", *options]


def python() -> list[str]:
    """This Python, without the packages of the machine (``-S``) where this one runs without."""
    return [sys.executable, *_flags()]


def _flags() -> Iterator[str]:
    if sys.flags.no_site:
        yield "-S"
    if sys.flags.no_user_site:
        yield "-s"


def environment() -> dict[str, str]:
    """For processes that find the library beside this file, in whatever state the machine is."""
    found = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "KERAS_BACKEND": "tensorflow"}
    source = str(BENCHMARKS.parent / "src")
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
