"""Synchronization of what callbacks do on several workers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.loops.worker_agreement import any_worker, differ, has_several_workers, union
from tfmultigpu.steps.train_step import Trained
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["WorkerSync"]


class WorkerSync:
    """Keeps workers with different callbacks in step; all workers must call every method."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: Any,
        trained: Sequence[Trained],
        names: list[str],
    ) -> None:
        """Compares the callbacks of the workers.

        Args:
            strategy: The strategy of the model.
            model: The model.
            trained: Each trained model with its optimizer and variables.
            names: The class names of this worker's callbacks.
        """
        self._strategy = strategy
        self._model = model
        self._trained = trained
        self._several = has_several_workers(strategy)
        self._same = True
        if self._several:
            numbers = [zlib.crc32(" ".join(names).encode())]
            self._same = len(union(strategy, numbers)) == 1

    def asked_to_stop(self) -> bool:
        """Returns whether a callback of any worker has asked to stop."""
        if self._several:
            self._model.stop_training = any_worker(self._strategy, bool(self._model.stop_training))
        return bool(self._model.stop_training)

    def stopped(self, called: bool) -> bool:
        """Returns whether to stop in the middle of an epoch.

        Args:
            called: Whether callbacks were called; the same on all workers.
        """
        return (called or not self._several) and self.asked_to_stop()

    def end_epoch(self) -> bool:
        """Returns whether to stop after an epoch.

        Raises:
            ClusterError: A callback changed the training of some workers only.
        """
        self.check()
        return bool(self._model.stop_training)

    def check(self) -> None:
        """Checks that all workers have the same learning rate, and the same weights.

        Compares the weights only if the workers have different callbacks. If a callback of any
        worker has asked to stop, all of them stop.

        Raises:
            ClusterError: The workers differ.
        """
        if not self._several:
            return
        rates = [float(tf.convert_to_tensor(one.optimizer.learning_rate)) for one in self._trained]
        variables = [v for one in self._trained for v in one.variables]
        sums = [] if self._same else [_total(variable) for variable in variables]
        # One exchange for both: each waits for the slowest worker.
        told = WorkerExchange(self._strategy).floats(
            [*rates, *sums, float(bool(self._model.stop_training))]
        )
        self._model.stop_training = bool(told[:, -1].any())
        differing = differ(told[:, :-1])
        if any(differing):
            first = differing.index(True)
            value = f"learning rate {rates[first]:g}" if first < len(rates) else "weights"
            raise ClusterError(
                "Only some workers changed their learning rate or weights, so the replicas no "
                f"longer have one model. Received: {value} of this worker, and others elsewhere. "
                "Give callbacks that change training (ReduceLROnPlateau, LearningRateScheduler, "
                "EarlyStopping, your own) to every worker. Only callbacks that just log may run on "
                "one worker."
            )


def _total(variable: Any) -> float:
    return float(np.sum(np.asarray(variable.numpy()), dtype="float64"))
