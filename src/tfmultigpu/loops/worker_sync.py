"""Training that goes on, stops and changes alike on all workers."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import WorkersDifferError
from tfmultigpu.loops.worker_agreement import differ, of_any, on_any, several_workers

__all__ = ["WorkerSync"]


class WorkerSync:
    """Looks after what callbacks do, which may be others on each worker."""

    def __init__(self, strategy: tf.distribute.Strategy, model: Any, names: list[str]) -> None:
        """Takes the names of this worker's callbacks; all workers must make it."""
        self._strategy = strategy
        self._model = model
        self._several = several_workers(strategy)
        self._same = True
        if self._several:
            numbers = [zlib.crc32(" ".join(names).encode())]
            self._same = len(of_any(strategy, numbers)) == 1

    def asked_to_stop(self) -> bool:
        """Returns whether a callback of any worker has asked to stop; all must call it."""
        if self._several:
            self._model.stop_training = on_any(self._strategy, bool(self._model.stop_training))
        return bool(self._model.stop_training)

    def stopped(self, told: bool) -> bool:
        """Returns whether to stop in the middle of an epoch.

        Args:
            told: Whether callbacks were called, on every worker or on none.
        """
        return (told or not self._several) and self.asked_to_stop()

    def end_epoch(self) -> bool:
        """Returns whether to stop after an epoch.

        Raises:
            WorkersDifferError: A callback changed the training of some workers only.
        """
        self.check()
        return self.asked_to_stop()

    def check(self) -> None:
        """Checks that the workers still train alike; where all have the same callbacks, briefly.

        Raises:
            WorkersDifferError: They do not.
        """
        if not self._several:
            return
        rate = float(tf.convert_to_tensor(self._model.optimizer.learning_rate))
        sums = [] if self._same else [_total(one) for one in self._model.trainable_variables]
        apart = differ(self._strategy, [rate, *sums])
        if any(apart):
            what = f"learning rate {rate:g}" if apart[0] else "weights"
            raise WorkersDifferError(
                "Something that only some workers do has changed their training, so that the "
                f"replicas no longer have one model. Received: {what} of this worker, and others "
                "elsewhere. Give callbacks that change training (ReduceLROnPlateau, "
                "LearningRateScheduler, EarlyStopping, your own) to every worker; only those that "
                "look and write may be for one."
            )


def _total(variable: Any) -> float:
    return float(np.sum(np.asarray(variable.numpy()), dtype="float64"))
