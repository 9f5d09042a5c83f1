"""The part of a run that ``fit`` holds, in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from tfmultigpu import checkpoint_state as state
from tfmultigpu.worker_exchange import WorkerExchange

__all__ = ["FitPart"]

_PREFIX = "fit/"
_Arrays = Mapping[str, np.ndarray[Any, Any]]


class Fit(Protocol):
    """The object that ``fit`` hands to callbacks that save a run."""

    def restore(self, facts: Mapping[str, Any], arrays: _Arrays) -> None:
        """Takes what was saved."""

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Returns what is to be saved."""

    def stops(self) -> bool:
        """Returns whether a callback of any worker ends the run."""


class FitPart:
    """The part of a run that ``fit`` holds: read from it, kept until there is one, given to it."""

    def __init__(self) -> None:
        """Knows of no ``fit``."""
        self._fit: Fit | None = None
        self._stored: tuple[Mapping[str, Any], _Arrays] | None = None
        self._numbers: tuple[list[Mapping[str, Any]], _Arrays] | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is a ``fit``, or the part of one that was saved."""
        return self._fit is not None or self._stored is not None

    @property
    def seed(self) -> int | None:
        """The seed of the order of arrays in the ``fit`` that was restored."""
        return None if self._stored is None else int(self._stored[0]["seed"])

    def keep(self, facts: Mapping[str, Any], arrays: _Arrays) -> None:
        """Takes the facts and arrays of a checkpoint, of which it keeps this part."""
        self._fit = None
        stored = facts.get("fit")
        own = {name: array for name, array in arrays.items() if name.startswith(_PREFIX)}
        self._stored = None if stored is None else (stored, own)
        numbers = [
            one
            for one in facts["variables"]
            if not one["name"].startswith("model/") and arrays[one["name"]].size == 1
        ]
        self._numbers = numbers, {one["name"]: arrays[one["name"]] for one in numbers}

    def attach(self, fit: Fit) -> None:
        """Gives a ``fit`` what was saved, and saves it from now on.

        Raises:
            RestoreMismatchError: Its data is other data than when it was saved.
        """
        self._fit = fit
        if self._stored is not None:
            stored, self._stored = self._stored, None
            fit.restore(*stored)

    def forget(self) -> None:
        """Has it that the run goes on without a ``fit``."""
        self._fit = self._stored = None

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], _Arrays]:
        """Returns facts and arrays for a checkpoint; every worker must call it."""
        if self._fit is None:
            return ({}, {}) if self._stored is None else ({"fit": self._stored[0]}, self._stored[1])
        facts, arrays = self._fit.read(in_epoch)
        return {"fit": facts}, arrays

    def ends(self) -> bool:
        """Returns whether a callback has asked to stop, so that the epoch is about to end."""
        return self._fit is not None and self._fit.stops()

    def put_back_numbers(self, slots: Mapping[str, state.Slot], exchange: WorkerExchange) -> None:
        """Puts single numbers back: the learning rate, the step count, those of the user's.

        In an epoch that is resumed callbacks hear ``on_epoch_begin`` again, and may have changed
        what they had changed before.
        """
        if self._numbers is not None:
            (facts, arrays), self._numbers = self._numbers, None
            state.write_state(slots, arrays, facts, exchange)
