"""What a ``fit`` knows beside the model: callbacks, logs of the epoch so far, marks of the data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.checkpoints.callback_states import CallbackStates
from tfmultigpu.checkpoints.marks import other_data
from tfmultigpu.checkpoints.state import StateVariable, fits, read_state, write_state
from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.epoch import Trainer
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.worker_agreement import of_chief, on_any
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["FitState", "stored_beginning"]

_log = logging.getLogger("tfmultigpu")


class FitState:
    """The part of a run that ``fit`` holds, for callbacks that save it.

    Such a callback has ``on_fit_begin``, which gets this object before ``on_train_begin``. It calls
    ``read`` to save, and ``restore`` with what was saved, at once.

    Attributes:
        sums: Sums over the batches of the present epoch, of which logs are made.
        first_epoch: The epoch that the run began with, ``initial_epoch`` of its first process.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        callbacks: Any,
        trainer: Trainer,
        feed: EpochIterator,
        model: Any,
        hooks: BatchHooks,
        seed: int,
        first_epoch: int,
    ) -> None:
        """Takes what the training consists of.

        Args:
            strategy: Where the model lives.
            callbacks: The ``CallbackList``, whose ``on_train_begin`` was not called so far.
            trainer: What trains.
            feed: The batches.
            model: The model.
            hooks: What is told of its batches, and counts them.
            seed: The seed of the order of arrays.
            first_epoch: The epoch that the run began with.
        """
        self.sums: dict[str, float] = {}
        self._trainer = trainer
        self._feed = feed
        self._model = model
        self._hooks = hooks
        self._seed = seed
        self.first_epoch = first_epoch
        self._exchange = WorkerExchange(strategy)
        self._stored: Mapping[str, Any] | None = None
        self._arrays: Mapping[str, np.ndarray[Any, Any]] = {}
        self._keepers = [one for one in callbacks.callbacks if hasattr(one, "on_fit_begin")]
        self._states = CallbackStates(callbacks.callbacks if self._keepers else (), model)

    def restore(self, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Takes what was saved; it is put back when training begins.

        Raises:
            RestoreMismatchError: The data is other data than when it was saved.
        """
        here = self._feed.mark
        apart = {
            name: value
            for name, value in facts["data"].items()
            if name in here and None not in (value, here[name]) and value != here[name]
        }
        if apart:
            told = ", ".join(f"{name}={here[name]!r}, then {apart[name]!r}" for name in apart)
            raise other_data(
                told,
                "Give fit the same data and batch_size as then, or give Checkpoints another "
                "directory to begin anew.",
            )
        self._stored, self._arrays = facts, arrays
        self._hooks.seen = facts["seen"]

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Around ``on_train_begin``: callbacks begin, and get back what was saved of them."""
        for one in self._keepers:
            one.on_fit_begin(self)
        stored = () if self._stored is None else self._stored["callbacks"]
        begun = self._states.prepare(stored)
        try:
            yield
        finally:
            begun()
        if self._keepers:
            self._states.begin()
        if self._stored is not None:
            self._states.tell_differences(stored)
            self._states.write(stored, self._arrays)

    def has_ended(self) -> bool:
        """Returns whether a callback had ended the run that is resumed, and is here again.

        All workers must call it: the chief decides.
        """
        if self._stored is None or not self._stored["stopped"]:
            return False
        missing = self._states.missing(self._stored["callbacks"], with_state=False)
        # Those of the chief were saved; other workers may have fewer.
        is_over = bool(of_chief(self._exchange.strategy, not missing))
        if is_over:
            _log.warning(
                "This run is over: a callback ended it before its last epoch, and its checkpoint "
                "says so. To train further, leave out the callback that ended it."
            )
        return is_over

    def begin_epoch(self, resumed: bool) -> None:
        """Begins the logs of an epoch; ``resumed`` in the middle of one: where they were.

        Call it after ``on_epoch_begin``, which callbacks then hear for the second time.
        """
        self.sums.clear()
        self._trainer.compiled.reset()
        if not resumed or self._stored is None:
            return
        self._states.write(self._stored["callbacks"], self._arrays)
        epoch = self._stored["epoch"]
        slots = self._slots()
        if epoch is None or not fits(slots, epoch["metrics"]):
            if slots or epoch is None:
                _log.warning(
                    "The model has other metrics than when the checkpoint was saved: the logs of "
                    "this epoch are those of its remaining batches."
                )
            return
        write_state(slots, self._arrays, epoch["metrics"], self._exchange)
        self.sums.update(epoch["sums"])

    def logs(self) -> dict[str, Any] | None:
        """Returns the logs of the epoch so far; None where there are none."""
        return self._trainer.logs(self.sums) if self.sums else None

    @property
    def seen(self) -> int:
        """Batches so far, those before a restart included."""
        return self._hooks.seen

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Reads all of it; every worker must call it.

        Args:
            in_epoch: Whether the run is in the middle of an epoch.

        Returns:
            What JSON can hold, and arrays.
        """
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        facts: dict[str, Any] = {
            "callbacks": self._states.read(arrays),
            "stopped": self.stops() and not in_epoch,
            "seen": self.seen,
            "seed": self._seed,
            "data": self._feed.mark,
            "epoch": None,
        }
        if in_epoch:
            found, metrics = read_state(self._slots(), self._exchange)
            arrays.update(found)
            facts["epoch"] = {"sums": dict(self.sums), "metrics": metrics}
        return facts, arrays

    def stops(self) -> bool:
        """Returns whether a callback of any worker ends the run; all must call it."""
        return on_any(self._exchange.strategy, bool(self._model.stop_training))

    def _slots(self) -> dict[str, StateVariable]:
        variables = self._trainer.compiled.variables
        slots = [
            StateVariable(f"fit/metrics/{i:04d}", one, True) for i, one in enumerate(variables)
        ]
        return {slot.name: slot for slot in slots}


def stored_beginning(callbacks: Sequence[Any], seed: int, first_epoch: int) -> tuple[int, int]:
    """Returns seed of the order of arrays and first epoch of a restored run, or those given."""
    for one in callbacks:
        stored = getattr(one, "stored_beginning", None)
        if stored is not None:
            return int(stored[0]), int(stored[1])
    return seed, first_epoch
