"""The state of ``fit`` in the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from tfmultigpu.checkpoints import state
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
        self.first_epoch = 0

    @property
    def is_present(self) -> bool:
        """True if there is a ``fit``, or the saved state of one."""
        return self._fit is not None or self._stored is not None

    @property
    def start(self) -> tuple[int, int] | None:
        """The shuffle seed and the first epoch of the restored ``fit``."""
        return None if self._stored is None else (int(self._stored[0]["seed"]), self.first_epoch)

    def load(self, metadata: Mapping[str, Any], arrays: _Arrays) -> None:
        """Holds this part of the metadata and arrays of a checkpoint."""
        self._fit = None
        stored = metadata.get("fit")
        own = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
        self._stored = None if stored is None else (stored, own)
        self.first_epoch = int((stored or {}).get("first_epoch", 0))
        self._resumes = True

    def attach(
        self,
        fit: Fit,
        variables: Mapping[str, state.StateVariable],
        exchange: WorkerExchange,
        begun: bool,
    ) -> None:
        """Restores the saved state into a ``fit``, and saves it from now on.

        All workers must call it.

        Args:
            fit: The ``fit``, before ``on_train_begin``.
            variables: The variables of the run.
            exchange: The workers of the run.
            begun: Whether the run has made steps before.

        Raises:
            RestoreMismatchError: The data differs from the data of the checkpoint.
        """
        self._fit = fit
        if self._stored is not None:
            stored, self._stored = self._stored, None
            fit.restore(*stored)
        elif not begun:
            self.first_epoch = fit.first_epoch
        self._restored = None
        if self._resumes:
            self._resumes = False
            self._restored = (variables, *state.read_state(variables, exchange), exchange)

    def detach(self) -> None:
        """Drops the ``fit`` and its saved state: the run continues in a loop without ``fit``."""
        self._fit = self._stored = None
        self._resumes = False

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], _Arrays]:
        """Returns metadata and arrays for a checkpoint; all workers must call it."""
        if self._fit is None:
            return ({}, {}) if self._stored is None else ({"fit": self._stored[0]}, self._stored[1])
        metadata, arrays = self._fit.read(in_epoch)
        return {"fit": {**metadata, "first_epoch": self.first_epoch}}, arrays

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
