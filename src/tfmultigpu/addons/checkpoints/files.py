"""Checkpoints as files, each whole or not there.

``step-00000120.npz`` holds the arrays of a run, which NumPy reads, and its description as JSON in
the array ``run``. It is written under a hidden name, flushed to the disk, and put in place by one
rename, which also replaces an older file of the same step. The checksums of zip show later damage.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Arrays",
    "Stored",
    "check_writable",
    "newest",
    "path_of",
    "prune",
    "read",
    "steps_in",
    "write",
]

Arrays = Mapping[str, np.ndarray[Any, Any]]

_NAME = re.compile(r"step-(\d+)\.npz")
_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Stored:
    """An intact checkpoint.

    Attributes:
        path: Its file.
        run: The description of the run, in JSON types.
        arrays: The arrays by name.
        checksum: A checksum of its content.
    """

    path: Path
    run: Mapping[str, Any]
    arrays: Arrays
    checksum: int


def path_of(directory: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a step."""
    return directory / f"step-{step:08d}.npz"


def write(directory: Path, step: int, arrays: Arrays, run: Mapping[str, Any]) -> Path:
    """Writes a checkpoint, which survives a loss of power after the return.

    Args:
        directory: The directory of all checkpoints; created if missing.
        step: The step. An existing checkpoint of the same step is replaced.
        arrays: The arrays by name.
        run: The description of the run, in JSON types.

    Raises:
        OSError: It could not be written; existing checkpoints are unchanged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for half_written in directory.glob(".step-*"):  # By processes that died.
        half_written.unlink()
    text = json.dumps({"format": _FORMAT, "step": step, **run})
    path = path_of(directory, step)
    hidden = directory / f".{path.name}"
    try:
        with hidden.open("wb") as file:
            np.savez(file, run=np.frombuffer(text.encode(), "uint8"), **arrays)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # The new name must reach the disk, too.
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    return path


def read(path: Path) -> Stored:
    """Reads a checkpoint whole.

    Raises:
        Exception: It is damaged. A changed byte may raise almost any error.
    """
    arrays, checksums = {}, []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
                # zipfile compares the checksum at the end of an entry.
                if file.read(1):
                    raise ValueError(f"{entry.filename} has more bytes than its array")
            arrays[entry.filename.removesuffix(".npy")] = array
            checksums.append((entry.filename, entry.CRC))
    run = json.loads(arrays.pop("run").tobytes())
    if run["format"] != _FORMAT:
        raise ValueError(f"its format is {run['format']!r}, and this version reads {_FORMAT}")
    missing = sorted(run["variables"].keys() - arrays.keys())
    if missing or run["step"] != _step_of(path):
        raise ValueError(f"it is of step {run['step']} and lacks the arrays {missing[:3]}")
    return Stored(path, run, arrays, zlib.crc32(repr(checksums).encode()))


def newest(directory: Path) -> tuple[Stored | None, set[int]]:
    """Returns the newest intact checkpoint, and the steps of newer damaged ones.

    A warning names each damaged one; it points to the caller of the caller.
    """
    damaged: set[int] = set()
    while True:
        for path in reversed(_paths(directory)):
            if _step_of(path) in damaged:
                continue
            try:
                return read(path), damaged
            except FileNotFoundError:
                break  # Another run has just saved a newer one and deleted this: look again.
            except Exception as error:
                warnings.warn(
                    f"A checkpoint is damaged and was skipped. Received: {path}: "
                    f"{type(error).__name__}: {error}. The run resumes from an older one.",
                    UserWarning,
                    stacklevel=3,
                )
                damaged.add(_step_of(path))
        else:
            return None, damaged


def prune(directory: Path, step: int, keep: int) -> None:
    """Deletes all checkpoints up to a step except the newest ``keep``."""
    for path in [path for path in _paths(directory) if _step_of(path) <= step][:-keep]:
        path.unlink(missing_ok=True)


def steps_in(directory: Path, ignored: Collection[int] = ()) -> list[int]:
    """Returns the steps that have a checkpoint, in order, without some."""
    return [step for step in map(_step_of, _paths(directory)) if step not in ignored]


def check_writable(directory: Path) -> None:
    """Creates a directory, and tries to write to it.

    Raises:
        OSError: That is not possible.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _paths(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_file()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
