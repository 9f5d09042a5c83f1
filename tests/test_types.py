"""Type checkers refuse the calls that people mistype, and accept the right ones."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import tfmultigpu
from tfmultigpu import types
from tfmultigpu.strategies.plan import COMMUNICATIONS, KINDS

CALLS = Path(__file__).with_name("typed_calls.py")
SOURCE = str(Path(tfmultigpu.__file__).parents[1])
LINES = enumerate(CALLS.read_text().splitlines(), 1)
WRONG = {number for number, line in LINES if line.endswith("  # error")}


def errors_of(checker: str, *options: str) -> str:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs the package {checker}")
    command = [sys.executable, "-m", checker, *options]
    environment = {**os.environ, "MYPYPATH": SOURCE}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_the_choices_of_types_are_those_of_the_library() -> None:
    assert get_args(types.Prefer) == ("auto", *KINDS)
    assert get_args(types.Communication) == COMMUNICATIONS


@pytest.mark.slow
def test_mypy_finds_the_wrong_calls(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    # As for a user, whose checker reports errors of their own files alone.
    config.write_text(
        "[mypy]\ncheck_untyped_defs = True\n[mypy-tfmultigpu.*]\nfollow_imports = silent\n"
        "[mypy-keras.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
    )
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path), str(CALLS)]
    output = errors_of("mypy", *options)
    assert {int(line) for line in re.findall(r"typed_calls\.py:(\d+): error", output)} == WRONG


@pytest.mark.slow
def test_pyright_finds_the_wrong_calls(tmp_path: Path) -> None:
    config = tmp_path / "pyrightconfig.json"
    (tmp_path / CALLS.name).write_text(CALLS.read_text())
    config.write_text(json.dumps({"include": [CALLS.name], "extraPaths": [SOURCE]}))
    options = ["--outputjson", "--project", str(config), "--pythonpath", sys.executable]
    output = json.loads(errors_of("pyright", *options))["generalDiagnostics"]
    errors = [finding["range"]["start"]["line"] + 1 for finding in output
              if finding["severity"] == "error"]  # fmt: skip
    assert set(errors) == WRONG, output
