"""The command that adds an extra fits the way in which the library was installed."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tfmultigpu import installation
from tfmultigpu.installation import install_command


class Installed:
    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


GIT = {"vcs": "git", "commit_id": "0123abc"}


COMMANDS: list[tuple[Any, str]] = [
    (None, "pip install 'tfmultigpu[demo]'"),
    (
        {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}},
        "pip install -e '/home/me/my clone[demo]'",
    ),
    ({"url": "file:///clone", "dir_info": {}}, "pip install '/clone[demo]'"),
    (
        {"url": "file:///dist/tfmultigpu-0.1.0-py3-none-any.whl", "archive_info": {}},
        "pip install '/dist/tfmultigpu-0.1.0-py3-none-any.whl[demo]'",
    ),
    (
        {"url": "https://example.org/t.git", "vcs_info": GIT},
        "pip install 'tfmultigpu[demo] @ git+https://example.org/t.git'",
    ),
    (
        {"url": "https://example.org/t.git", "vcs_info": {**GIT, "requested_revision": "v1"}},
        "pip install 'tfmultigpu[demo] @ git+https://example.org/t.git@v1'",
    ),
    (
        {"url": "https://example.org/t.whl", "archive_info": {}},
        "pip install 'tfmultigpu[demo] @ https://example.org/t.whl'",
    ),
]


def test_installs_from_where_the_library_came(monkeypatch: pytest.MonkeyPatch) -> None:
    for origin, command in COMMANDS:
        found = Installed(origin)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, found=found: found)
        assert install_command("demo") == command


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    module = tmp_path / "src" / "tfmultigpu" / "installation.py"
    monkeypatch.setattr(installation, "__file__", str(module))
    assert install_command("nvml") == "pip install 'tfmultigpu[nvml]'"
    (tmp_path / "pyproject.toml").touch()
    assert install_command("nvml") == f"pip install -e '{tmp_path.resolve()}[nvml]'"


def test_the_command_of_this_installation_names_what_exists() -> None:
    _, target, rest = install_command("demo").split("'")
    assert rest == ""
    if not target.startswith("tfmultigpu["):
        path = target.removesuffix("[demo]")
        assert path != target
        assert Path(path).exists()
