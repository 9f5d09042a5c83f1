"""One directory of checkpoints for several workers: the chief writes, and all read the same."""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfmultigpu.checkpoints import storage as files
from tfmultigpu.errors import CheckpointError, ClusterError
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["SharedFiles", "warn_damaged"]

# A shared file system may show a new file to other machines only seconds later.
_LOOKS = 5
_SECONDS_BETWEEN_LOOKS = 1.0
# Attempts to read a checkpoint that another run may delete.
_READS = 20
_NONE = -1


class SharedFiles:
    """Checkpoints in a shared directory; all workers must call every method.

    Attributes:
        directory: The directory.
    """

    def __init__(self, directory: Path, exchange: WorkerExchange) -> None:
        """Stores the directory and the exchange between the workers."""
        self.directory = directory
        self._exchange = exchange
        self._known_to_be_shared = exchange.workers == 1
        self._known_to_be_writable = False
        self._cleaned = False

    def write(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        metadata: Mapping[str, Any],
        keep: int,
    ) -> Path:
        """Makes the chief write a checkpoint and delete all but the newest ``keep``.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The chief could not write it, or the directory has later steps.
            CheckpointError: Another worker does not see it.
        """
        failure: OSError | None = None
        number, latest = _NONE, step
        if self._exchange.is_chief:
            try:
                latest = self._latest(step)
            except OSError as error:
                failure = error
        if self._exchange.is_chief and failure is None and latest == step:
            try:
                if not self._cleaned:
                    files.clean(self.directory)
                    self._cleaned = True
                path = files.write(self.directory, step, arrays, metadata).path
                number = files.number_of(path)[1]
                files.prune(self.directory, keep)
            except OSError as error:
                failure = error
        of_chief = self._exchange([int(failure is not None), number, latest])[0]
        if of_chief[0]:
            raise CheckpointError(
                f"The chief could not write the checkpoint of step {step} to {self.directory}: "
                f"{failure or 'see the output of the chief'}. Older checkpoints are unchanged."
            ) from failure
        self._refuse_later(step, int(of_chief[2]))
        path = files.folder_of(self.directory, step, int(of_chief[1]))
        if not self._known_to_be_shared:
            self._check_seen(path)
        return path

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Checks that all workers have the same settings.

        Args:
            settings: The settings by name, compared by their ``repr``.

        Raises:
            ClusterError: They differ, so some workers would wait for the others forever.
        """
        if (found := self._exchange.find_difference(settings)) is not None:
            name, other = found
            raise ClusterError(
                "The workers have different settings of Checkpoints, so some would wait for the "
                f"others forever. Received: {name}={settings[name]!r} on worker "
                f"{self._exchange.worker}, and another value on worker {other}. Create the same "
                "tmg.Checkpoints on all workers."
            )

    def check_writable(self) -> None:
        """Makes the chief write a file that all must see; once, before any training.

        Raises:
            CheckpointError: The chief could not write it.
            CheckpointError: Another worker does not see it.
        """
        if self._known_to_be_writable:
            return
        failure: OSError | None = None
        own = uuid.uuid4().int >> 70
        if self._exchange.is_chief:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                files.token(self.directory, own).write_bytes(b"")
            except OSError as error:
                failure = error
        of_chief = self._exchange([int(failure is not None), own])[0]
        if of_chief[0]:
            raise CheckpointError(
                f"The chief cannot write to {self.directory}: "
                f"{failure or 'see the output of the chief'}. No checkpoint could be saved. Give a "
                "directory that it may write to."
            ) from failure
        path = files.token(self.directory, int(of_chief[1]))
        try:
            if not self._known_to_be_shared:
                self._check_seen(path)
        finally:
            if self._exchange.is_chief:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._known_to_be_writable = True

    def check_no_later_steps(self, step: int) -> None:
        """Checks that the directory has no checkpoint later than the step of the run.

        Only the newest are kept, so the checkpoints of such a run would be deleted at once.

        Raises:
            CheckpointError: The directory has later steps.
        """
        self._refuse_later(step, self._latest(step))

    def newest(self) -> tuple[files.Stored | None, list[files.Damaged]]:
        """Returns the newest intact checkpoint, the same on all workers, and newer damaged ones.

        Raises:
            CheckpointError: Workers see different checkpoints.
        """
        for look in range(_LOOKS):
            found, damaged = files.newest(self.directory)
            rows = self._exchange(_identify(found))
            if (rows == rows[0]).all():
                return found, damaged
            if look < _LOOKS - 1:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        seen = "; ".join(
            f"worker {i}: " + (f"step {row[0]} ({row[1]:015x})" if row[0] != _NONE else "nothing")
            for i, row in enumerate(rows.tolist())
        )
        raise CheckpointError(
            f"The workers see different checkpoints in {self.directory}, so they would resume from "
            f"different weights. Received: {seen}. Give a directory on a file system that all "
            "workers share, or copy the newest checkpoint of the chief to the others."
        )

    def read_newest(
        self,
    ) -> tuple[files.Stored | None, dict[str, np.ndarray[Any, Any]], list[files.Damaged]]:
        """Returns the newest intact checkpoint, its arrays, and newer damaged ones.

        Another run may delete a checkpoint during the read; the search then starts again.

        Raises:
            CheckpointError: Every attempt to read failed.
            CheckpointError: Workers see different checkpoints.
        """
        failure: OSError | None = None
        for _ in range(_READS):
            found, damaged = self.newest()
            arrays: dict[str, np.ndarray[Any, Any]] = {}
            failure = None
            try:
                arrays = {} if found is None else files.read_arrays(found)
            except OSError as error:
                failure = error
            if not self._exchange([int(failure is not None)]).any():
                return found, arrays, damaged
        raise CheckpointError(
            f"The checkpoints in {self.directory} disappear before all workers have read them. "
            f"Received: {failure or 'see the output of the other workers'}. Stop the run that "
            "writes there, or give it a larger keep."
        ) from failure

    def set_aside(self, damaged: Sequence[files.Damaged]) -> None:
        """Makes the chief rename damaged checkpoints.

        Half-written ones stay until this run saves: another run may be writing them.
        """
        if self._exchange.is_chief:
            for one in damaged:
                # A run may be restored from a read-only directory.
                with contextlib.suppress(OSError):
                    files.set_aside(one)

    def _latest(self, step: int) -> int:
        return max([step, *files.stored_steps(self.directory)])

    def _refuse_later(self, step: int, latest: int) -> None:
        if latest > step:
            raise CheckpointError(
                f"{self.directory} has checkpoints of later steps. Only the newest are kept, so "
                f"this run would lose its own. Received: step {latest} there, and a run at step "
                f"{step}. Call checkpoints.restore() first to resume, or give another directory to "
                "start over."
            )

    def _check_seen(self, path: Path) -> None:
        for _ in range(_LOOKS):
            seen = self._exchange([int(path.exists())])[:, 0]
            if seen.all():
                self._known_to_be_shared = True
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        raise CheckpointError(
            f"The chief wrote {path}, but workers {np.flatnonzero(seen == 0).tolist()} do not see "
            "it, so they could not resume from it. Give a directory on a file system that all "
            "workers share."
        )


def warn_damaged(
    directory: Path, damaged: Sequence[files.Damaged], found: files.Stored | None
) -> None:
    """Warns of damaged checkpoints; the warning names the line that called the caller.

    Raises:
        CheckpointError: All checkpoints are damaged.
    """
    for one in damaged:
        warnings.warn(
            f"A checkpoint is damaged and was skipped. Received: {one.path}: {one.reason}. "
            + ("" if found is None else f"The run resumes from {found.path.name}."),
            UserWarning,
            stacklevel=3,
        )
    if damaged and found is None:
        raise CheckpointError(
            f"All checkpoints in {directory} are damaged. Received: "
            f"{[one.path.name for one in damaged]}. To start over, give another directory or "
            "delete this one."
        )


def _identify(found: files.Stored | None) -> list[int]:
    return [_NONE, 0] if found is None else [found.step, int(found.digest[:15], 16)]
