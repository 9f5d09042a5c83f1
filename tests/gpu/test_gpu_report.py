"""The one command for GPU machines: what it runs, what it writes, and what it says went wrong."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def check(name: str = "limit.limit", **values: Any) -> dict[str, Any]:
    return {"name": name, "status": "passed", "seconds": 1.0, "facts": {}, "error": ""} | values


@pytest.mark.slow
def test_the_command_runs_in_a_rehearsal(runner: Any, tmp_path: Path) -> None:
    only = ["--only", "transformer-tf32-32", "memory-transformer-bfloat16-32"]
    one = runner.run_part("transformer-tf32-32", 500.0, True)
    assert [found["status"] for found in one] == ["passed"], one
    assert set(one[0]["per_second"]) == {"plain", "ours"}
    losses = one[0]["first_loss"]
    assert abs(losses["ours"] / losses["plain"] - 1) < 1e-5
    # The same results again, without their processes.
    other = [check("memory", kind="memory", status="not run", error="a GPU")]
    runner.run_part = lambda name, *_: one if name == only[1] else other
    assert runner.main(["--rehearse", *only, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    # In the order of the runner, not in the one asked for.
    assert [found["status"] for found in written["benchmarks"]] == ["not run", "passed"]
    assert written["machine"]["versions"]["tensorflow"]
    page = (tmp_path / "gpu.md").read_text()
    assert "a rehearsal; no number here says anything about a GPU" in page
    assert "- memory: a GPU" in page


def test_without_a_gpu_nothing_is_run(
    runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.seen_gpus = lambda: (0, "Cannot dlopen some GPU libraries.")
    assert runner.main(["--out", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "TensorFlow sees no GPU here, so nothing was run." in said
    assert said.endswith("TensorFlow said:\nCannot dlopen some GPU libraries.\n")
    assert not (tmp_path / "report").exists()


# Processes: one that dies or hangs costs its own only ---------------------------------------------


def script(text: str) -> list[str]:
    """A process that writes ``lines``, then does what ``text`` says."""
    return [sys.executable, "-S", "-c", f"import os, sys, time\n{text}", "LINES"]


@pytest.mark.parametrize(
    ("seconds", "silent", "problem"),
    [(0.5, 600.0, "took longer than 0 s"), (600.0, 0.5, "wrote nothing for 0 s")],
)
def test_a_process_that_hangs_is_ended_with_all_it_started(
    runner: Any, tmp_path: Path, seconds: float, silent: float, problem: str
) -> None:
    pid = tmp_path / "pid"
    both = (
        f"child = os.fork()\nif child: open({str(pid)!r}, 'w').write(str(child))\ntime.sleep(600)"
    )
    parts = importlib.import_module("gpu.parts")
    ended = parts.watched(script(both), seconds, silent)
    assert ended.problem == problem
    state = Path(f"/proc/{pid.read_text()}/stat")
    until = time.monotonic() + 60.0
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_checks_after_one_that_dies_run_in_another_process(
    runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts = importlib.import_module("gpu.parts")
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
