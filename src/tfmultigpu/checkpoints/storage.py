"""Checkpoints as folders of plain files: written atomically, and checked when read.

``step-00000120/arrays.npz`` holds the arrays. ``step-00000120/manifest.json`` describes them and
holds their SHA-256. Both are written into a hidden folder and flushed to the disk. Then the folder
is renamed, which is atomic. So a folder with such a name is intact, unless the disk damaged it
later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfmultigpu.checkpoints.manifest import find_problem

__all__ = [
    "Damaged",
    "Stored",
    "clean",
    "folder_of",
    "newest",
    "number_of",
    "prune",
    "read_arrays",
    "read_manifest",
    "set_aside",
    "stored_steps",
    "token",
    "write",
]

_FORMAT = 1
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_TEMPORARY = ".writing-"
_TRASH = ".deleting-"
_TOKEN = ".looking-"
_ASIDE = "damaged-"
_ARRAYS = "arrays.npz"
_MANIFEST = "manifest.json"
_DIGEST = "manifest_sha256"
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Stored:
    """An intact checkpoint.

    Attributes:
        path: Its folder.
        step: Its step.
        digest: The SHA-256 of its manifest, in hex digits.
        metadata: The fields of its manifest.
    """

    path: Path
    step: int
    digest: str
    metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A folder with the name of a checkpoint that is not an intact one.

    Attributes:
        path: The folder.
        reason: The damage.
    """

    path: Path
    reason: str


def write(
    directory: Path,
    step: int,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    metadata: Mapping[str, Any],
) -> Stored:
    """Writes a checkpoint; it survives a loss of power after the return.

    Args:
        directory: The directory of all checkpoints; created if missing.
        step: The step. Existing checkpoints of the same step count as older.
        arrays: The arrays, by name.
        metadata: More fields of the manifest, in JSON types.

    Raises:
        OSError: It could not be written; existing checkpoints are unchanged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory / f"{_TEMPORARY}{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        with (folder / _ARRAYS).open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            _flush(file)
        checksum, size = _checksum(folder / _ARRAYS)
        manifest = {
            "format": _FORMAT,
            "step": step,
            "arrays_sha256": checksum,
            "arrays_bytes": size,
            **metadata,
        }
        digest = _digest(manifest)
        with (folder / _MANIFEST).open("w", encoding="utf-8") as text:
            json.dump({**manifest, _DIGEST: digest}, text, indent=1)
            _flush(text)
        _flush_folder(folder)
        final = _free_name(directory, step)
        folder.rename(final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _flush_folder(directory)
    return Stored(final, step, digest, manifest)


def newest(directory: Path) -> tuple[Stored | None, list[Damaged]]:
    """Returns the newest intact checkpoint, and the damaged ones that are newer."""
    while True:
        found, damaged, deleted = _search(directory)
        if not deleted:
            return found, damaged


def _search(directory: Path) -> tuple[Stored | None, list[Damaged], bool]:
    """Searches once; also returns whether another run deleted a checkpoint meanwhile."""
    damaged: list[Damaged] = []
    for path in reversed(_folders(directory)):
        found = read_manifest(path)
        if isinstance(found, Stored):
            problem = _problem_of_arrays(found)
            if problem is None:
                return found, damaged, False
            found = Damaged(path, problem)
        if not os.path.lexists(path):
            return None, damaged, True
        damaged.append(found)
    return None, damaged, False


def stored_steps(directory: Path) -> list[int]:
    """Returns the steps that have a checkpoint, intact or damaged."""
    return [number_of(path)[0] for path in _folders(directory)]


def read_manifest(path: Path) -> Stored | Damaged:
    """Reads the manifest of a checkpoint, without its arrays."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        return Damaged(path, f"{_MANIFEST} cannot be read: {error.strerror or error}")
    except (ValueError, RecursionError):
        return Damaged(path, f"{_MANIFEST} is not JSON")
    if not isinstance(manifest, dict) or manifest.pop(_DIGEST, None) != _digest(manifest):
        return Damaged(path, f"{_MANIFEST} has changed since it was written")
    if manifest.get("format") != _FORMAT:
        return Damaged(
            path, f"its format is {manifest.get('format')!r:.40}, and this version reads {_FORMAT}"
        )
    problem = find_problem(manifest)
    if problem is not None:
        return Damaged(path, f"{_MANIFEST} was not written by this library: {problem}")
    if manifest["step"] != number_of(path)[0]:
        return Damaged(path, f"{_MANIFEST} is of step {manifest['step']}")
    return Stored(path, manifest["step"], _digest(manifest), manifest)


def read_arrays(stored: Stored) -> dict[str, np.ndarray[Any, Any]]:
    """Reads the arrays of a checkpoint, by name."""
    with np.load(stored.path / _ARRAYS, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def prune(directory: Path, keep: int) -> None:
    """Deletes all checkpoints except the newest ``keep``."""
    for path in _folders(directory)[:-keep]:
        _delete(path)


def set_aside(damaged: Damaged) -> Path:
    """Renames a damaged checkpoint, so that it no longer counts, and returns its new path."""
    aside = damaged.path.with_name(f"{_ASIDE}{damaged.path.name}")
    if aside.exists():
        _delete(aside)
    return damaged.path.rename(aside)


def clean(directory: Path) -> None:
    """Deletes the unfinished files of processes that died; call it while no run writes."""
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith((_TEMPORARY, _TRASH)):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_TOKEN):
                path.unlink(missing_ok=True)


def token(directory: Path, number: int) -> Path:
    """Returns the path of the file that tests whether the directory is writable and shared."""
    return directory / f"{_TOKEN}{number:x}"


def _folders(directory: Path) -> list[Path]:
    """Lists the folders with the name of a checkpoint, the oldest first."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if _NAME.fullmatch(p.name)), key=number_of)


def number_of(path: Path) -> tuple[int, int]:
    """Returns the step of a folder, and its number among the folders of that step."""
    parts = path.name.split("-")
    return int(parts[1]), int(parts[2]) if len(parts) > 2 else 0


def folder_of(directory: Path, step: int, number: int) -> Path:
    """Returns the folder for a step and a number; the inverse of ``number_of``."""
    return directory / (f"step-{step:08d}-{number}" if number else f"step-{step:08d}")


def _free_name(directory: Path, step: int) -> Path:
    """Returns an unused name: replacing a folder is not atomic."""
    taken = [number_of(path)[1] for path in _folders(directory) if number_of(path)[0] == step]
    return folder_of(directory, step, max(taken, default=-1) + 1)


def _problem_of_arrays(stored: Stored) -> str | None:
    path = stored.path / _ARRAYS
    try:
        size = path.stat().st_size
        if size != stored.metadata["arrays_bytes"]:
            return f"{_ARRAYS} has {size} bytes instead of {stored.metadata['arrays_bytes']}"
        checksum, _ = _checksum(path)
    except OSError as error:
        return f"{_ARRAYS} cannot be read: {error.strerror or error}"
    if checksum != stored.metadata["arrays_sha256"]:
        return f"{_ARRAYS} does not match its checksum"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            missing = {entry["name"] for entry in stored.metadata.get("variables", ())} - set(
                arrays.files
            )
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError):
        return f"{_ARRAYS} cannot be read as an npz file"
    return f"{_ARRAYS} lacks {sorted(missing)[:3]}" if missing else None


def _delete(path: Path) -> None:
    # Rename first: an interrupted deletion must not leave half a checkpoint under its name.
    trash = path.with_name(f"{_TRASH}{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(trash)
        if trash.is_symlink():
            trash.unlink()
        shutil.rmtree(trash, ignore_errors=True)


def _digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _checksum(path: Path) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            size += len(chunk)
    return found.hexdigest(), size


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk; only POSIX systems need this."""
    if os.name == "posix":
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
