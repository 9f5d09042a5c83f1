"""Checkpoints in a directory of all workers; each file is whole or not there.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tfmultigpu.errors import CheckpointError
from tfmultigpu.recorder import noting
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Array

Arrays: TypeAlias = Mapping[str, Array]
Content: TypeAlias = tuple[Mapping[str, Any], Arrays]  # The description of a run, its arrays.
_FORMAT = 6


class Stored(NamedTuple):
    """An intact checkpoint: its file, the description of the run, arrays of it and of ``fit``."""

    path: Path
    run: dict[str, Any]
    arrays: Arrays
    of_fit: Arrays


def steps_in(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints by their steps, in order."""
    paths: dict[int, Path] = {}
    for path in directory.glob("step-*.npz"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal():
            paths[int(number)] = path
    return dict(sorted(paths.items()))


def read(path: Path) -> Stored:
    """Reads a checkpoint whole; of a damaged one a changed byte may raise almost any error."""
    with zipfile.ZipFile(path) as archive:
        # An entry is read to its end, where zipfile compares its checksum.
        arrays: dict[str, Array] = {}
        for name in archive.namelist():
            content = io.BytesIO(archive.read(name))
            arrays[name.removesuffix(".npy")] = np.load(content, allow_pickle=False)
    run = json.loads(arrays.pop("run").tobytes())
    if (run["format"], run["arrays"]) != (_FORMAT, len(arrays)):
        raise ValueError(
            f"it has format {run['format']} and {len(arrays)} of {run['arrays']} arrays; this "
            f"version reads format {_FORMAT}"
        )
    of_fit = {name: arrays.pop(name) for name in list(arrays) if name.startswith("fit/")}
    return Stored(path, run, arrays, of_fit)


def newest(directory: Path, exchange: WorkerExchange) -> Stored | None:
    """Returns the newest intact checkpoint; None if there is none, damaged or not.

    All workers must call it, and see the same one.
    """
    stored: Stored | None = None
    damaged: list[Path] = []
    for path in reversed(steps_in(directory).values()):
        try:
            with noting("restore", str(path)):
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
    steps = exchange("the step of the newest checkpoint", [step])[:, 0].tolist()
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"The workers see different checkpoints in {directory}.",
            f"step of each worker: {steps}",
            "Give a directory that all workers share.",
        )
    if stored is None and damaged:
        raise CheckpointError(
            f"All checkpoints in {directory} are damaged.",
            f"{[path.name for path in damaged]}",
            "To start over, give another directory.",
        )
    if exchange.is_chief:
        for path in damaged:  # They would count as later.
            path.rename(path.with_name(f"damaged-{path.name}"))
    return stored


def save(
    directory: Path, exchange: WorkerExchange, step: int, keep: int, content: Content | None = None
) -> Path:
    """Has the chief write a checkpoint to last, and delete all but the newest ``keep``.

    All workers must call it, and learn whether the chief could. Without ``content``, the
    description of the run and its arrays, it is only checked that the chief may.
    """
    path, failure = directory / f"step-{step:08d}.npz", ""
    try:
        if exchange.is_chief:
            directory.mkdir(parents=True, exist_ok=True)
            if later := [other for other in steps_in(directory) if other > step]:
                raise FileExistsError(f"it has step {later[-1]}, which this run has not reached")
            if content is not None:
                with noting("save", str(path), step):
                    _write(path, step, *content)
                for old in list(steps_in(directory).values())[:-keep]:
                    old.unlink(missing_ok=True)
    except OSError as error:
        failure = f"{type(error).__name__}: {error}"
    if exchange("how the chief wrote a checkpoint", [int(bool(failure))])[0, 0]:
        raise CheckpointError(
            f"The chief cannot save step {step} to {directory}.",
            failure or "see the output of the chief",
            "Its checkpoints are unchanged. To resume from them, call checkpoints.restore() "
            "first. To start over, give another directory; it must be writable and have enough "
            "space.",
        )
    return path


def _write(path: Path, step: int, run: Mapping[str, Any], arrays: Arrays) -> None:
    text = json.dumps({"format": _FORMAT, "arrays": len(arrays), "step": step, **run})
    hidden = path.with_name(".half-written.npz")
    with hidden.open("wb") as file:
        np.savez(file, run=np.frombuffer(text.encode(), "uint8"), **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)
