"""State of a ``fit`` beside the model: callbacks, logs of the current epoch, data description."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.checkpoints.callback_states import CallbackStates
from tfmultigpu.checkpoints.marks import data_mismatch
from tfmultigpu.checkpoints.state import StateVariable, fits, read_state, write_state
from tfmultigpu.loops.callbacks import BatchHooks
from tfmultigpu.loops.epoch import Trainer
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.worker_agreement import any_worker, value_of_chief
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["FitState", "restored_start"]

_log = logging.getLogger("tfmultigpu")


class FitState:
    """State of a ``fit``, for callbacks that save it.

    Such a callback has ``on_fit_begin``, which receives this object before ``on_train_begin``. The
    callback calls ``restore`` there with a saved state, and ``read`` later to save.

    Attributes:
        sums: Sums over the batches of the current epoch, from which logs are made.
        first_epoch: The ``initial_epoch`` of this ``fit`` in its first process.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        callbacks: Any,
        trainer: Trainer,
        epoch_iterator: EpochIterator,
        model: Any,
        hooks: BatchHooks,
        seed: int,
        first_epoch: int,
    ) -> None:
        """Stores the parts of the training.

        Args:
            strategy: The strategy of the model.
            callbacks: The ``CallbackList``, before ``on_train_begin``.
            trainer: The trainer of the model.
            epoch_iterator: The batches.
            model: The model.
            hooks: The batch hooks, which count batches.
            seed: The shuffle seed of arrays.
            first_epoch: The ``initial_epoch`` of this ``fit`` in its first process.
        """
        self.sums: dict[str, float] = {}
        self._trainer = trainer
        self._epoch_iterator = epoch_iterator
        self._model = model
        self._hooks = hooks
        self._seed = seed
        self.first_epoch = first_epoch
        self._exchange = WorkerExchange(strategy)
        self._stored: Mapping[str, Any] | None = None
        self._arrays: Mapping[str, np.ndarray[Any, Any]] = {}
        self._savers = [one for one in callbacks.callbacks if hasattr(one, "on_fit_begin")]
        self._states = CallbackStates(callbacks.callbacks if self._savers else (), model)

    def restore(self, metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Accepts a saved state; it is restored when training begins.

        Raises:
            CheckpointError: The data differs from the data of the checkpoint.
        """
        here = self._epoch_iterator.description
        differing = {
            name: value
            for name, value in metadata["data"].items()
            if name in here and None not in (value, here[name]) and value != here[name]
        }
        if differing:
            received = ", ".join(
                f"{name}={here[name]!r}, in the checkpoint {value!r}"
                for name, value in differing.items()
            )
            raise data_mismatch(
                received,
                "Give fit the same data and batch_size as before, or give Checkpoints another "
                "directory to start over.",
            )
        self._stored, self._arrays = metadata, arrays
        self._hooks.seen = metadata["seen"]

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Restores the callbacks; the block must call ``on_train_begin``."""
        for one in self._savers:
            one.on_fit_begin(self)
        stored = () if self._stored is None else self._stored["callbacks"]
        finish_prepare = self._states.prepare(stored)
        try:
            yield
        finally:
            finish_prepare()
        if self._savers:
            self._states.begin()
        if self._stored is not None:
            self._states.log_differences(stored)
            self._states.write(stored, self._arrays)

    def has_ended(self) -> bool:
        """Returns whether a callback had ended the resumed run and is passed again.

        All workers must call it: the chief decides.
        """
        if self._stored is None or not self._stored["stopped"]:
            return False
        missing = self._states.missing(self._stored["callbacks"], with_state=False)
        # The checkpoint has the callbacks of the chief; other workers may have fewer.
        has_ended = bool(value_of_chief(self._exchange.strategy, not missing))
        if has_ended:
            _log.warning(
                "A callback ended this run before its last epoch, as its checkpoint records. To "
                "train further, leave out that callback."
            )
        return has_ended

    def begin_epoch(self, resumed: bool) -> None:
        """Resets the logs of an epoch, or restores them if the epoch is resumed.

        Call it after ``on_epoch_begin``, which is a repeated call in a resumed epoch.
        """
        self.sums.clear()
        self._trainer.metrics.reset()
        if not resumed or self._stored is None:
            return
        self._states.write(self._stored["callbacks"], self._arrays)
        epoch = self._stored["epoch"]
        variables = self._metric_variables()
        if epoch is None or not fits(variables, epoch["metrics"]):
            if variables or epoch is None:
                _log.warning(
                    "The metrics of the model differ from those of the checkpoint. The logs of "
                    "this epoch cover only its remaining batches."
                )
            return
        write_state(variables, self._arrays, epoch["metrics"], self._exchange)
        self.sums.update(epoch["sums"])

    def logs(self) -> dict[str, Any] | None:
        """Returns the logs of the epoch so far; None before its first batch."""
        return self._trainer.logs(self.sums) if self.sums else None

    def changed_variables(self) -> list[Any]:
        """Returns what the training changes: weights, optimizers, and states in closures."""
        return self._trainer.step.changed_variables()

    @property
    def seen(self) -> int:
        """Batches so far, including those before a restart."""
        return self._hooks.seen

    def read(self, in_epoch: bool) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        """Reads the state; all workers must call it.

        Args:
            in_epoch: Whether the run is in the middle of an epoch.

        Returns:
            Metadata in JSON types, and arrays.
        """
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        metadata: dict[str, Any] = {
            "callbacks": self._states.read(arrays),
            "stopped": self.stops() and not in_epoch,
            "seen": self.seen,
            "seed": self._seed,
            "initial_epoch": self.first_epoch,
            "data": self._epoch_iterator.description,
            "epoch": None,
        }
        if in_epoch:
            found, metrics = read_state(self._metric_variables(), self._exchange)
            arrays.update(found)
            metadata["epoch"] = {"sums": dict(self.sums), "metrics": metrics}
        return metadata, arrays

    def stops(self) -> bool:
        """Returns whether a callback of any worker ends the run; all workers must call it."""
        return any_worker(self._exchange.strategy, bool(self._model.stop_training))

    def _metric_variables(self) -> dict[str, StateVariable]:
        names = {f"fit/metrics/{i:04d}": v for i, v in enumerate(self._trainer.metrics.variables)}
        return {name: StateVariable(name, variable, True) for name, variable in names.items()}


def restored_start(callbacks: Sequence[Any], seed: int, first_epoch: int) -> tuple[int, int]:
    """Returns the shuffle seed and first epoch of a restored ``fit``, or else the given ones."""
    for one in callbacks:
        stored = getattr(one, "restored_start", None)
        if stored is not None:
            return int(stored[0]), int(stored[1])
    return seed, first_epoch
