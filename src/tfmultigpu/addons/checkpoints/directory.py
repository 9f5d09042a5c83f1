"""One directory of checkpoints for all workers: the chief writes, and all read the same."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfmultigpu.addons.checkpoints import files
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["Directory"]


class Directory:
    """The checkpoints of a run; all workers must call every method."""

    def __init__(self, path: Path, exchange: WorkerExchange) -> None:
        """Stores the path; reads and writes nothing."""
        self._path, self._exchange = path, exchange
        self._damaged: set[int] = set()

    def newest(self) -> files.Stored | None:
        """Returns the newest intact checkpoint; None if there is none, damaged or not."""
        stored, self._damaged = files.newest(self._path)
        seen = [-1, 0] if stored is None else [stored.run["step"], stored.checksum]
        on_workers = self._exchange(seen).tolist()
        if on_workers.count(seen) < len(on_workers):
            raise CheckpointError(
                f"The workers see different checkpoints in {self._path}, so they would resume "
                f"from different weights. Received: [step, checksum] of each worker: {on_workers}. "
                "Give a directory on a file system that all workers share, or copy the newest "
                "checkpoint of the chief to the others."
            )
        if stored is None and self._damaged:
            raise CheckpointError(
                f"All checkpoints in {self._path} are damaged. Received: those of steps "
                f"{sorted(self._damaged)}. To start over, give another directory or delete this "
                "one."
            )
        return stored

    def write(self, step: int, arrays: files.Arrays, run: Mapping[str, Any], keep: int) -> Path:
        """Has the chief write a checkpoint, and delete all but the newest ``keep``."""

        def write() -> None:
            files.write(self._path, step, arrays, run)
            files.prune(self._path, step, keep)

        self._on_chief(step, write)
        return files.path_of(self._path, step)

    def check(self, step: int) -> None:
        """Checks that a run at a step may write, before any training."""
        self._on_chief(step, self._write_nothing)

    def _write_nothing(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._path):
            pass

    def _on_chief(self, step: int, write: Callable[[], None]) -> None:
        """Has the chief write, if there are no later steps; all workers learn whether it could."""
        failure: OSError | None = None
        latest = step
        if self._exchange.is_chief:
            try:
                latest = max([step, *files.steps_in(self._path, self._damaged)])
                if latest == step:
                    write()
            except OSError as error:
                failure = error
        failed, latest = self._exchange([int(failure is not None), latest])[0].tolist()
        if failed:
            raise CheckpointError(
                f"The chief cannot write to {self._path}: "
                f"{failure or 'see the output of the chief'}. Older checkpoints are unchanged. "
                "Give a directory that it may write to, with enough space."
            ) from failure
        if latest > step:
            raise CheckpointError(
                f"{self._path} has checkpoints of later steps. Only the newest are kept, so this "
                f"run would lose its own. Received: step {latest} there, and a run at step {step}. "
                "Call checkpoints.restore() first to resume, or give another directory to start "
                "over."
            )
