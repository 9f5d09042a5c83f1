"""Checkpoints as files, each whole or not there.

``step-00000120.npz`` holds the arrays of a run, which NumPy reads, and its description as JSON in
the array ``run``. It is written under a hidden name, flushed to the disk, and put in place by one
rename, which also replaces an older file of the same step. The checksums of zip show later damage.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Arrays", "Stored", "newest", "path_of", "prune", "read", "steps_in", "write"]

Arrays = Mapping[str, np.ndarray[Any, Any]]
_NAME = re.compile(r"step-(\d+)\.npz")
_FORMAT = 2


class Stored(NamedTuple):
    """An intact checkpoint: its file, the description of the run, its arrays, and a checksum."""

    path: Path
    run: dict[str, Any]
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
        half_written.unlink(missing_ok=True)
    text = json.dumps({"format": _FORMAT, "step": step, **run})
    path = path_of(directory, step)
    hidden = directory / f".{path.name}"
    try:
        with hidden.open("wb") as file:
            content: dict[str, Any] = {"run": np.frombuffer(text.encode(), "uint8"), **arrays}
            np.savez(file, **content)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # The new name must reach the disk, too.
        number = os.open(directory, os.O_RDONLY)
        os.fsync(number)
        os.close(number)
    return path


def read(path: Path) -> Stored:
    """Reads a checkpoint whole; of a damaged one a changed byte may raise almost any error."""
    arrays, checksums = {}, []
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
                if file.read(1):  # zipfile compares the checksum at the end of an entry.
                    raise ValueError(f"{entry.filename} is longer than its array")
            arrays[entry.filename.removesuffix(".npy")] = array
            checksums.append((entry.filename, entry.CRC))
    run = json.loads(arrays.pop("run").tobytes())
    missing = run["variables"].keys() - arrays.keys()
    if run["format"] != _FORMAT or run["step"] != _step_of(path) or missing:
        raise ValueError(
            f"it has format {run['format']!r} (this version reads {_FORMAT}), is of step "
            f"{run['step']}, and lacks {len(missing)} arrays"
        )
    return Stored(path, run, arrays, zlib.crc32(repr(checksums).encode()))


def newest(directory: Path) -> tuple[Stored | None, set[int]]:
    """Returns the newest intact checkpoint, and the steps of newer damaged ones.

    A warning names each damaged one, at the line that called ``Checkpoints.restore``.
    """
    damaged: set[int] = set()
    while True:
        for step in reversed(steps_in(directory, damaged)):
            path = path_of(directory, step)
            try:
                return read(path), damaged
            except FileNotFoundError:
                break  # Another run has saved a newer one and deleted this: look again.
            except Exception as error:
                damaged.add(step)
                warnings.warn(
                    f"A checkpoint is damaged and was skipped. Received: {path}: "
                    f"{type(error).__name__}: {error}. The run resumes from an older one.",
                    stacklevel=4,
                )
        else:
            return None, damaged


def prune(directory: Path, step: int, keep: int) -> None:
    """Deletes all checkpoints up to a step except the newest ``keep``."""
    for old in [other for other in steps_in(directory) if other <= step][:-keep]:
        path_of(directory, old).unlink(missing_ok=True)


def steps_in(directory: Path, without: set[int] | frozenset[int] = frozenset()) -> list[int]:
    """Returns the steps that have a checkpoint, in order, without some."""
    files = [path for path in directory.glob("step-*.npz") if _NAME.fullmatch(path.name)]
    return sorted({_step_of(path) for path in files if path.is_file()} - without)


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
