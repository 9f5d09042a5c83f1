"""Processes of the command for GPU machines: one that dies, hangs or raves costs its own only."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu.parts")
    for name in [name for name in sys.modules if name.split(".")[0] == "gpu"]:
        del sys.modules[name]


def script(text: str) -> list[str]:
    """A process that writes ``lines``, then does what ``text`` says."""
    return [sys.executable, "-S", "-c", f"import os, sys, time\n{text}", "LINES"]


WRITE = 'open(sys.argv[1], \'a\').write(\'{"name": "a", "status": "passed"}\\n\')\n'
PASSED = {"name": "a", "status": "passed"}


def test_what_was_written_before_a_process_was_killed_is_kept(parts: Any) -> None:
    ended = parts.watched(
        script(f"{WRITE}print('so far', flush=True); os.kill(os.getpid(), 9)"), 30
    )
    assert (ended.lines, ended.problem, ended.said) == ([PASSED], "ended with -9", "so far\n")


@pytest.mark.parametrize(
    ("seconds", "silent", "problem"),
    [(0.5, 600.0, "took longer than 0 s"), (600.0, 0.5, "wrote nothing for 0 s")],
)
def test_a_process_that_hangs_is_ended_with_all_it_started(
    parts: Any, tmp_path: Path, seconds: float, silent: float, problem: str
) -> None:
    pid = tmp_path / "pid"
    both = (
        f"child = os.fork()\nif child: open({str(pid)!r}, 'w').write(str(child))\ntime.sleep(600)"
    )
    ended = parts.watched(script(both), seconds, silent)
    assert ended.problem == problem
    state = Path(f"/proc/{pid.read_text()}/stat")
    until = time.monotonic() + 60.0
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_checks_after_one_that_dies_run_in_another_process(
    parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def watched(command: list[str], seconds: float) -> Any:
        commands.append(command)
        names = command[command.index("--only") + 1 :] if "--only" in command else ["a", "b", "c"]
        lines: list[dict[str, Any]] = [{"expected": names}]
        for name in names:
            lines.append({"begun": name})
            if name == "b":
                return parts.Ended(lines, "ended with -6", "CUDA_ERROR_ILLEGAL_ADDRESS")
            lines.append({"name": name, "status": "passed", "error": ""})
        return parts.Ended(lines, "", "")

    monkeypatch.setattr(parts, "watched", watched)
    found = parts.run_part("limit", 100.0, True, tmp_path / "log")
    assert [(one["name"], one["status"]) for one in found] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "passed"),
    ]
    assert found[1]["error"] == "CUDA_ERROR_ILLEGAL_ADDRESS\nended with -6"
    assert len(commands) == 2
    assert commands[1][-2:] == ["--only", "c"]
    assert (tmp_path / "log").read_text().startswith("==== limit: ended with -6\nCUDA_ERROR")
