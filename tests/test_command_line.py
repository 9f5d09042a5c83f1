"""The command line: its version, its help, and readers that stop reading."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tfmultigpu as tmg
from tfmultigpu import __main__ as command_line
from tfmultigpu.__main__ import main
from tfmultigpu.clusters import launcher

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--version") == f"tfmultigpu {tmg.__version__}\n"


def test_help_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ((), ("doctor",), ("demo",), ("launch",)):
        text = shown(capsys, *command, "--help")
        assert "`" not in text
        assert "usage: python -m tfmultigpu" in text
        # Each option has an explanation.
        options = re.findall(r"^  (-.*?)(?:\n {24}|  )(\S+)", text, re.MULTILINE)
        assert len(options) == len(re.findall(r"^  -", text, re.MULTILINE)) >= 1


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(f"\n    {name} " in err for name in ("doctor", "demo", "launch"))


def test_the_console_script_is_this_function(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert '[project.scripts]\ntfmultigpu = "tfmultigpu.__main__:main"\n' in PYPROJECT.read_text()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tfmultigpu", "--help"])
    assert "usage: tfmultigpu [-h]" in shown(capsys, "--help")


def test_a_reader_that_stopped_reads_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tfmultigpu", "launch", "--help"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_command_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(options: Any) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(launcher, "run", run)
    assert command_line.main(["launch", str(tmp_path / "any.py")]) == 128 + signal.SIGPIPE
