"""One folder of checkpoints for several workers: the first one writes, all must see the same."""

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
from tfmultigpu.errors import (
    CheckpointError,
    DamagedCheckpointWarning,
    RestoreMismatchError,
    WorkersDifferError,
)
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["SharedFiles", "tell_damaged"]

# A shared file system may show the other machines a new file only seconds later.
_LOOKS = 5
_BETWEEN = 1.0
# How often a checkpoint may be gone before it was read.
_READS = 20
_NONE = -1


class SharedFiles:
    """The checkpoints in a directory; every worker must call every method.

    Attributes:
        directory: The directory.
    """

    def __init__(self, directory: Path, exchange: WorkerExchange) -> None:
        """Takes how workers tell each other numbers."""
        self.directory = directory
        self._exchange = exchange
        self._known_to_be_shared = exchange.workers == 1
        self._known_to_be_writable = False
        self._cleaned = False

    def write(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        facts: Mapping[str, Any],
        keep: int,
    ) -> Path:
        """Has the chief write a checkpoint and delete those that are too many.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: It could not be written, or there are later steps already.
            RestoreMismatchError: Another worker does not see it.
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
                path = files.write(self.directory, step, arrays, facts).path
                number = files.number_of(path)[1]
                files.prune(self.directory, keep)
            except OSError as error:
                failure = error
        told = self._exchange([int(failure is not None), number, latest])
        if told[0, 0]:
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to {self.directory} on the "
                f"first worker: {failure or 'see what that worker says'}. The older ones are as "
                "they were."
            ) from failure
        self._refuse_later(step, int(told[0, 2]))
        path = files.folder_of(self.directory, step, int(told[0, 1]))
        if not self._known_to_be_shared:
            self._check_seen(path)
        return path

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Checks that all workers save alike.

        Args:
            settings: The same names on every worker, and values whose ``repr`` says what they are.

        Raises:
            WorkersDifferError: They do not, and one would wait for others that go on.
        """
        if (found := self._exchange.find_difference(settings)) is not None:
            name, other = found
            raise WorkersDifferError(
                "The workers were given different checkpoints, and some would wait for the others "
                f"for ever. Received: {name}={settings[name]!r} on worker "
                f"{self._exchange.worker}, and something else on worker {other}. Every worker must "
                "make the same tmg.Checkpoints."
            )

    def check_writable(self) -> None:
        """Has the chief write a file, for which all look; once, before anything is trained.

        Raises:
            CheckpointError: It could not be written.
            RestoreMismatchError: Another worker does not see it.
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
        told = self._exchange([int(failure is not None), own])
        if told[0, 0]:
            raise CheckpointError(
                f"Nothing can be written to {self.directory} on the first worker, so that no "
                f"checkpoint could be saved: {failure or 'see what that worker says'}. Give a "
                "directory that this process may write to."
            ) from failure
        path = files.token(self.directory, int(told[0, 1]))
        try:
            if not self._known_to_be_shared:
                self._check_seen(path)
        finally:
            if self._exchange.is_chief:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._known_to_be_writable = True

    def check_own(self, step: int) -> None:
        """Checks that what is there is not later than the step of the run.

        The newest are kept: what such a run saves would be deleted at once.

        Raises:
            CheckpointError: There are later steps already.
        """
        self._refuse_later(step, self._latest(step))

    def newest(self) -> tuple[files.Stored | None, list[files.Damaged]]:
        """Returns the newest whole checkpoint, the same on all workers, and newer damaged ones.

        Raises:
            RestoreMismatchError: Workers see different ones.
        """
        for look in range(_LOOKS):
            found, damaged = files.newest(self.directory)
            told = self._exchange(_marks(found))
            if (told == told[0]).all():
                return found, damaged
            if look < _LOOKS - 1:
                time.sleep(_BETWEEN)
        seen = "; ".join(
            f"worker {i}: " + (f"step {row[0]} ({row[1]:015x})" if row[0] != _NONE else "nothing")
            for i, row in enumerate(told.tolist())
        )
        raise RestoreMismatchError(
            f"The workers see different checkpoints in {self.directory}, so they would go on from "
            f"different weights. Received: {seen}. The directory is not shared: give one on a file "
            "system that all workers see, or copy the newest checkpoint of the first worker to the "
            "others."
        )

    def read_newest(
        self,
    ) -> tuple[files.Stored | None, dict[str, np.ndarray[Any, Any]], list[files.Damaged]]:
        """Returns ``newest``, and its arrays between the two.

        A run that trains meanwhile may delete it while it is read: then the next newest is taken.

        Raises:
            CheckpointError: That happened again and again.
            RestoreMismatchError: Workers see different ones.
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
            f"The checkpoints in {self.directory} cannot be read: each was gone before it had been "
            f"read on all workers. Received: {failure or 'see what the others say'}. Another "
            "run writes there: stop it, or give it a larger keep."
        ) from failure

    def set_aside(self, damaged: Sequence[files.Damaged]) -> None:
        """Has the chief rename damaged checkpoints.

        What is half written stays until this run writes: it may be another's, whom this one only
        evaluates.
        """
        if self._exchange.is_chief:
            for one in damaged:
                # Of a folder that can only be read a run may still be restored.
                with contextlib.suppress(OSError):
                    files.set_aside(one)

    def _latest(self, step: int) -> int:
        return max([step, *files.stored_steps(self.directory)])

    def _refuse_later(self, step: int, latest: int) -> None:
        if latest > step:
            raise CheckpointError(
                f"There are checkpoints of a later step in {self.directory} already. Received: "
                f"step {latest} there, and a run at step {step}, whose checkpoints would not be "
                "among the newest, which are kept. Call checkpoints.restore() first to go on from "
                "there, or give another directory to begin anew."
            )

    def _check_seen(self, path: Path) -> None:
        for _ in range(_LOOKS):
            seen = self._exchange([int(path.exists())])[:, 0]
            if seen.all():
                self._known_to_be_shared = True
                return
            time.sleep(_BETWEEN)
        raise RestoreMismatchError(
            f"The first worker wrote {path}, and workers {np.flatnonzero(seen == 0).tolist()} do "
            "not see it, so that they could not go on from it. The directory is not shared: give "
            "one on a file system that all workers see."
        )


def tell_damaged(
    directory: Path, damaged: Sequence[files.Damaged], found: files.Stored | None
) -> None:
    """Warns of damaged checkpoints, on behalf of who called the caller.

    Raises:
        CheckpointError: There are damaged ones alone.
    """
    for one in damaged:
        warnings.warn(
            f"A checkpoint is damaged and was passed over. Received: {one.path}: {one.reason}. "
            + ("" if found is None else f"The run goes on from {found.path.name}."),
            DamagedCheckpointWarning,
            stacklevel=3,
        )
    if damaged and found is None:
        raise CheckpointError(
            f"There are only damaged checkpoints in {directory}: "
            f"{[one.path.name for one in damaged]}. To begin anew, give another directory or "
            "delete this one."
        )


def _marks(found: files.Stored | None) -> list[int]:
    return [_NONE, 0] if found is None else [found.step, int(found.digest[:15], 16)]
