"""The way in which this library was installed, and the command that adds an optional package."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["install_command"]

_NAME = "tfmultigpu"


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, from where the library itself came.

    Args:
        extra: The name of the extra, such as ``"nvml"``.

    Example:
        >>> install_command("nvml").startswith("pip install ")
        True
    """
    return f"pip install {_requirement(extra, _origin(), _source_tree())}"


def _origin() -> Mapping[str, Any] | None:
    """Returns what pip noted about the origin; empty for an index, None if not installed."""
    try:
        noted = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    found: dict[str, Any] = json.loads(noted) if noted else {}
    return found


def _source_tree() -> Path | None:
    """Returns the folder of the clone that this module is in, or None."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def _requirement(extra: str, origin: Mapping[str, Any] | None, tree: Path | None) -> str:
    whole = f"{_NAME}[{extra}]"
    if origin is None:  # Run from a clone, by PYTHONPATH.
        return f"'{whole}'" if tree is None else f"-e '{tree}[{extra}]'"
    if not origin:
        return f"'{whole}'"
    url = str(origin["url"])
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        edited = origin.get("dir_info", {}).get("editable", False)
        return ("-e " if edited else "") + f"'{path}[{extra}]'"
    control = origin.get("vcs_info")
    if control:
        url = f"{control['vcs']}+{url}"
        if revision := control.get("requested_revision"):
            url += f"@{revision}"
    return f"'{whole} @ {url}'"
