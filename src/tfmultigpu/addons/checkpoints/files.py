"""A directory of checkpoints for all workers; each file is whole or not there.

``step-00000120.npz`` holds the arrays of a run, which NumPy reads, and its description as JSON in
the array ``run``. It is written under a hidden name, flushed to the disk, and put in place by one
rename, which also replaces an older file of the same step. The checksums of zip show later damage.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfmultigpu.errors import CheckpointError

Arrays = Mapping[str, np.ndarray[Any, Any]]
_FORMAT = 4


class Stored(NamedTuple):
    """An intact checkpoint: its file, the description of the run, its arrays."""

    path: Path
    run: dict[str, Any]
    arrays: Arrays


def steps_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints by their steps, in order."""
    paths = {int(p.stem[5:]): p for p in directory.glob("step-*.npz") if p.stem[5:].isdecimal()}
    return dict(sorted(paths.items()))


def read(path: Path) -> Stored:
    """Reads a checkpoint whole; of a damaged one a changed byte may raise almost any error."""
    with zipfile.ZipFile(path) as archive:
        # An entry is read to its end, where zipfile compares its checksum.
        arrays = {
            name.removesuffix(".npy"): np.load(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in archive.namelist()
        }
    run = json.loads(arrays.pop("run").tobytes())
    if (run["format"], run["arrays"]) != (_FORMAT, len(arrays)):
        raise ValueError(
            f"it has format {run['format']} and {len(arrays)} of {run['arrays']} arrays; this "
            f"version reads format {_FORMAT}"
        )
    return Stored(path, run, arrays)


class Directory:
    """The checkpoints of a run; all workers must call every method, and the chief writes."""

    def __init__(self, path: Path, exchange: Any) -> None:
        """Stores the path and the ``WorkerExchange``; reads and writes nothing."""
        self._path, self._exchange = path, exchange

    def newest(self) -> Stored | None:
        """Returns the newest intact checkpoint; None if there is none, damaged or not."""
        stored, damaged = None, []
        for path in reversed(steps_in(self._path).values()):
            try:
                stored = read(path)
                break
            except Exception as error:
                damaged.append(path)
                warnings.warn(
                    f"A checkpoint is damaged and was skipped. Received: {path}: "
                    f"{type(error).__name__}: {error}. The run resumes from an older one.",
                    stacklevel=3,
                )
        step = -1 if stored is None else stored.run["step"]
        steps = self._exchange("the step of the newest checkpoint", [step])[:, 0].tolist()
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"The workers see different checkpoints in {self._path}. Received: step of each "
                f"worker: {steps}. Give a directory that all workers share."
            )
        if stored is None and damaged:
            raise CheckpointError(
                f"All checkpoints in {self._path} are damaged. Received: "
                f"{[path.name for path in damaged]}. To start over, give another directory."
            )
        for path in damaged if self._exchange.is_chief else ():  # Else they would count as later.
            path.rename(path.with_name(f"damaged-{path.name}"))
        return stored

    def write(self, step: int, arrays: Arrays, run: Mapping[str, Any], keep: int) -> Path:
        """Writes a checkpoint to last, and deletes all others but the newest ``keep`` - 1."""
        path, hidden = self._path / f"step-{step:08d}.npz", self._path / ".half-written.npz"
        text = json.dumps({"format": _FORMAT, "arrays": len(arrays), "step": step, **run})

        def save() -> None:
            self._path.mkdir(parents=True, exist_ok=True)
            with hidden.open("wb") as file:
                np.savez(file, run=np.frombuffer(text.encode(), "uint8"), **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(path)
            for old in list(steps_in(self._path).values())[:-keep]:
                old.unlink(missing_ok=True)

        self._on_chief(step, save)
        return path

    def check(self, step: int) -> None:
        """Checks before any training that a run at a step may write."""
        self._on_chief(step, lambda: self._path.mkdir(parents=True, exist_ok=True))

    def _on_chief(self, step: int, save: Callable[[], object]) -> None:
        """Has the chief save, unless there are later steps; all workers learn whether it could."""
        failure = ""
        if self._exchange.is_chief:
            try:
                later = [other for other in steps_in(self._path) if other > step]
                failure = (
                    f"it has step {later[-1]}, which this run has not reached" if later else ""
                )
                if not later:
                    save()
            except OSError as error:
                failure = f"{type(error).__name__}: {error}"
        if self._exchange("how the chief wrote a checkpoint", [int(bool(failure))])[0, 0]:
            raise CheckpointError(
                f"The chief cannot save step {step} to {self._path}. Received: "
                f"{failure or 'see the output of the chief'}. Its checkpoints are unchanged. To "
                "resume from them, call checkpoints.restore() first. To start over, give another "
                "directory; it must be writable and have enough space."
            )
