"""The state of ``fit`` in the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from tfmultigpu.checkpoints import state
from tfmultigpu.data.resumable import Position
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["FitPart"]

_PREFIX = "fit/"
_Arrays = Mapping[str, np.ndarray[Any, Any]]
_Variables = tuple[Mapping[str, state.StateVariable], _Arrays, list[dict[str, Any]], WorkerExchange]


class Fit(Protocol):
    """The object that ``fit`` passes to callbacks that save a run."""

    first_epoch: int

    def restore(self, metadata: Mapping[str, Any], arrays: _Arrays) -> None:
        """Accepts the saved state."""

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns the state to save."""

    def stops(self) -> bool:
        """Returns whether a callback of any worker ends the run."""

    def changed_variables(self) -> list[Any]:
        """Returns what the training changes: weights, optimizers, and states in closures."""


class FitPart:
    """The state of ``fit`` in a run: read from ``fit``, or held until a ``fit`` takes it.

    Attributes:
        first_epoch: The epoch of ``fit`` that the run began with.
    """

    def __init__(self) -> None:
        """Starts without a ``fit``."""
        self._fit: Fit | None = None
        self._stored: tuple[Mapping[str, Any], _Arrays] | None = None
        self._restored: _Variables | None = None
        self._resumes = False
        self._began = 0
        self.first_epoch = 0

    @property
    def is_present(self) -> bool:
        """True if there is a ``fit``, or the saved state of one."""
        return self._fit is not None or self._stored is not None

    @property
    def start(self) -> tuple[int, int] | None:
        """The shuffle seed and the ``initial_epoch`` of the restored ``fit``."""
        if self._stored is None:
            return None
        return int(self._stored[0]["seed"]), int(self._stored[0]["initial_epoch"])

    def load(self, metadata: Mapping[str, Any], arrays: _Arrays) -> None:
        """Holds this part of the metadata and arrays of a checkpoint."""
        self._fit = self._restored = None
        stored = metadata.get("fit")
        own = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
        self._stored = None if stored is None else (stored, own)
        self.first_epoch = int(metadata.get("first_epoch", 0))
        self._resumes = True

    def skips(
        self,
        epochs: int,
        position: Position,
        variables: Mapping[str, state.StateVariable],
        exchange: WorkerExchange,
    ) -> bool:
        """Returns whether a ``fit`` had ended when a later loop of the program was saved.

        That loop takes the saved state. It also undoes what the program changes until then, as
        these changes are part of the checkpoint. All workers must call it.

        Args:
            epochs: The number of the last epoch of the ``fit``.
            position: The position of the run.
            variables: The variables of the run.
            exchange: The workers of the run.
        """
        place = self.first_epoch + position.epoch, position.step
        is_of_later = self._stored is not None and int(self._stored[0]["began"]) >= epochs
        if not self._resumes or place < (epochs, 0) or (place == (epochs, 0) and not is_of_later):
            return False
        if self._restored is None:
            self._restored = (variables, *state.read_state(variables, exchange), exchange)
        return True

    def attach(
        self,
        fit: Fit,
        variables: Mapping[str, state.StateVariable],
        exchange: WorkerExchange,
        position: Position,
    ) -> None:
        """Restores the saved state into a ``fit``, and saves it from now on.

        All workers must call it.

        Args:
            fit: The ``fit``, before ``on_train_begin``.
            variables: The variables of the run.
            exchange: The workers of the run.
            position: The position of the run.

        Raises:
            CheckpointError: The data differs from the data of the checkpoint.
        """
        self._fit = fit
        self.undo_begin_hooks(last=True)  # Undoes changes since a skipped ``fit``.
        if self._stored is not None:
            stored, self._stored = self._stored, None
            self._began = int(stored[0]["began"])
            fit.restore(*stored)
        else:
            if position == Position():
                self.first_epoch = fit.first_epoch
            self._began = self.first_epoch + position.epoch
        if self._resumes:
            self._resumes = False
            self._restored = (variables, *state.read_state(variables, exchange), exchange)

    def detach(self) -> None:
        """Drops the ``fit`` and its saved state: the run continues in a loop without ``fit``."""
        self._fit = self._stored = None
        self._resumes = False
        self.undo_begin_hooks(last=True)  # Undoes changes since a skipped ``fit``.

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], _Arrays]:
        """Returns metadata and arrays for a checkpoint; all workers must call it."""
        run = {"first_epoch": self.first_epoch}
        if self._fit is not None:
            metadata, arrays = self._fit.read(in_epoch)
            return {**run, "fit": {**metadata, "began": self._began}}, arrays
        if self._stored is not None:
            return {**run, "fit": self._stored[0]}, self._stored[1]
        return run, {}

    def is_stopping(self) -> bool:
        """Returns whether a callback has asked to stop, so that the epoch is about to end."""
        return self._fit is not None and self._fit.stops()

    def undo_begin_hooks(self, *, last: bool) -> None:
        """Restores the variables of a resumed run after a repeated begin hook.

        Keras calls ``on_train_begin`` again, and ``on_epoch_begin`` too in a resumed epoch.
        Callbacks may load weights, reset slots or set the learning rate there a second time.

        Args:
            last: Whether no repeated begin hook follows.
        """
        if self._restored is not None:
            state.write_state(*self._restored)
            if last:
                self._restored = None
