"""The part of a run that ``fit`` holds, in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from tfmultigpu.checkpoints import state
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["FitPart"]

_PREFIX = "fit/"
_Arrays = Mapping[str, np.ndarray[Any, Any]]
_Kept = tuple[Mapping[str, state.StateVariable], _Arrays, list[dict[str, Any]], WorkerExchange]


class Fit(Protocol):
    """The object that ``fit`` hands to callbacks that save a run."""

    first_epoch: int

    def restore(self, facts: Mapping[str, Any], arrays: _Arrays) -> None:
        """Takes what was saved."""

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns what is to be saved."""

    def stops(self) -> bool:
        """Returns whether a callback of any worker ends the run."""


class FitPart:
    """The part of a run that ``fit`` holds: read from it, kept until there is one, given to it.

    Attributes:
        first_epoch: The epoch of ``fit`` that the run began with.
    """

    def __init__(self) -> None:
        """Knows of no ``fit``."""
        self._fit: Fit | None = None
        self._stored: tuple[Mapping[str, Any], _Arrays] | None = None
        self._kept: _Kept | None = None
        self._resumes = False
        self.first_epoch = 0

    @property
    def is_known(self) -> bool:
        """Whether there is a ``fit``, or the part of one that was saved."""
        return self._fit is not None or self._stored is not None

    @property
    def beginning(self) -> tuple[int, int] | None:
        """The seed of the order of arrays, and the first epoch, of the ``fit`` restored."""
        return None if self._stored is None else (int(self._stored[0]["seed"]), self.first_epoch)

    def keep(self, facts: Mapping[str, Any], arrays: _Arrays) -> None:
        """Takes the facts and arrays of a checkpoint, of which it keeps this part."""
        self._fit = None
        stored = facts.get("fit")
        own = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
        self._stored = None if stored is None else (stored, own)
        self.first_epoch = int((stored or {}).get("first_epoch", 0))
        self._resumes = True

    def attach(
        self,
        fit: Fit,
        slots: Mapping[str, state.StateVariable],
        exchange: WorkerExchange,
        begun: bool,
    ) -> None:
        """Gives a ``fit`` what was saved, and saves it from now on; all workers must call it.

        Args:
            fit: The ``fit``, whose callbacks have not begun.
            slots: The variables of the run.
            exchange: Its workers.
            begun: Whether some of it was trained before.

        Raises:
            RestoreMismatchError: Its data is other data than when it was saved.
        """
        self._fit = fit
        if self._stored is not None:
            stored, self._stored = self._stored, None
            fit.restore(*stored)
        elif not begun:
            self.first_epoch = fit.first_epoch
        self._kept = None
        if self._resumes:
            self._resumes = False
            self._kept = (slots, *state.read_state(slots, exchange), exchange)

    def forget(self) -> None:
        """Has it that the run goes on without a ``fit``."""
        self._fit = self._stored = None
        self._resumes = False

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], _Arrays]:
        """Returns facts and arrays for a checkpoint; every worker must call it."""
        if self._fit is None:
            return ({}, {}) if self._stored is None else ({"fit": self._stored[0]}, self._stored[1])
        facts, arrays = self._fit.read(in_epoch)
        return {"fit": {**facts, "first_epoch": self.first_epoch}}, arrays

    def ends(self) -> bool:
        """Returns whether a callback has asked to stop, so that the epoch is about to end."""
        return self._fit is not None and self._fit.stops()

    def put_back(self, *, last: bool) -> None:
        """Gives the variables of a resumed run the values they had before callbacks began.

        Callbacks hear ``on_train_begin`` again, and ``on_epoch_begin`` in an epoch that is resumed,
        and may load weights, reset moments or set the learning rate there, as they had done.

        Args:
            last: Whether no beginning follows that callbacks had heard before.
        """
        if self._kept is not None:
            state.write_state(*self._kept)
            if last:
                self._kept = None
