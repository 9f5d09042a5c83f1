"""The command line: its version, its help, and readers that stop reading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tfmultigpu as tmg
from tfmultigpu.__main__ import main

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit, match=str(status)):
        main(arguments)
    return "".join(capsys.readouterr())


def test_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--version") == f"tfmultigpu {tmg.__version__}\n"


def test_help_names_every_command(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    assert "required: {doctor,demo,launch}" in shown(capsys, status=2)
    for command in ((), ("doctor",), ("demo",), ("launch",)):
        with subtests.test(command=command):
            assert "usage: python -m tfmultigpu" in shown(capsys, *command, "--help")


def test_the_console_script_is_this_function(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert '[project.scripts]\ntfmultigpu = "tfmultigpu.__main__:main"\n' in PYPROJECT.read_text()
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tfmultigpu", "--help"])
    assert "usage: tfmultigpu [-h]" in shown(capsys, "--help")


def test_wrong_arguments_of_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--workers", "0", "train.py"]) == 2
    assert "workers must be a whole number, at least 1" in capsys.readouterr().err


def test_a_reader_that_stopped_reads_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tfmultigpu", "launch", "--help"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600, check=False
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # Unbuffered, argparse itself ignores the closed pipe.
