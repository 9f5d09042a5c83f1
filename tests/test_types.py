"""Type checkers refuse the calls that people mistype, and accept the right ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import tfmultigpu
from tfmultigpu import types
from tfmultigpu.strategies.plan import COMMUNICATIONS, KINDS

CALLS = Path(__file__).parent / "typed_calls.py"
SOURCE = Path(tfmultigpu.__file__).parents[1]
WRONG = {
    number
    for number, line in enumerate(CALLS.read_text().splitlines(), 1)
    if line.endswith("  # error")
}


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {name}")


def run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        cwd=CALLS.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_the_choices_of_types_are_those_of_the_library() -> None:
    assert get_args(types.Prefer) == ("auto", *KINDS)
    assert get_args(types.Communication) == COMMUNICATIONS
    assert len(WRONG) == 29


@pytest.mark.slow
@needs("mypy")
def test_mypy_finds_the_wrong_calls(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    # As for a user, whose checker reports errors of their own files alone.
    config.write_text(
        "[mypy]\ncheck_untyped_defs = True\n[mypy-tfmultigpu.*]\nfollow_imports = silent\n"
        "[mypy-keras.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
    )
    cache = str(tmp_path / "cache")
    command = ["mypy", "--config-file", str(config), "--cache-dir", cache, "--no-error-summary"]
    out = run([sys.executable, "-m", *command, CALLS.name])
    found = {
        int(line.split(":")[1]) for line in out.splitlines() if line.startswith(f"{CALLS.name}:")
    }
    assert found == WRONG, out


@pytest.mark.slow
@needs("pyright")
def test_pyright_finds_the_wrong_calls(tmp_path: Path) -> None:
    config = tmp_path / "pyrightconfig.json"
    (tmp_path / CALLS.name).write_text(CALLS.read_text())
    config.write_text(json.dumps({"include": [CALLS.name], "extraPaths": [str(SOURCE)]}))
    command = ["pyright", "--outputjson", "--project", str(config)]
    out = run([sys.executable, "-m", *command, "--pythonpath", sys.executable])
    found = json.loads(out)["generalDiagnostics"]
    errors = {
        one["range"]["start"]["line"] + 1
        for one in found
        if one["severity"] == "error" and Path(one["file"]).name == CALLS.name
    }
    assert errors == WRONG, [one for one in found if one["severity"] == "error"]
