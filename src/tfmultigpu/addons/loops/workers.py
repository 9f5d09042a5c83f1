"""Decisions that all workers must make alike, because the next step is a collective."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.strategies.worker_exchange import WorkerExchange


def any_worker(strategy: tf.distribute.Strategy, flag: bool, purpose: str = "a flag") -> bool:
    """Returns whether ``flag`` is true on any worker; all workers must call it."""
    return bool(WorkerExchange(strategy)(purpose, [int(flag)]).any())


def union(strategy: tf.distribute.Strategy, numbers: Iterable[int]) -> list[int]:
    """Returns the sorted union of the workers' numbers, from 0 up; all workers must call it."""
    own = sorted(set(numbers))
    exchange = WorkerExchange(strategy)
    if exchange.workers == 1:
        return own
    most = int(exchange("how many numbers", [len(own)]).max())
    if not most:
        return []
    padded = exchange("a union of numbers", [*own, *[-1] * (most - len(own))])
    return sorted({int(number) for number in padded.ravel()} - {-1})


def check_alike(
    strategy: tf.distribute.Strategy, function: str, arguments: Mapping[str, Any]
) -> None:
    """Checks that all workers call a function with the same arguments; all must call it."""
    exchange = WorkerExchange(strategy)
    if (difference := exchange.find_difference(function, arguments)) is not None:
        name, other = difference
        raise ClusterError(
            f"The workers call {function} with different arguments, so some would wait for the "
            f"others forever. Received: {name}={arguments[name]!r} on worker {exchange.worker}, "
            f"and another value on worker {other}. Run the same program on every worker."
        )


class SameTraining:
    """Keeps workers with different callbacks in step; all workers must call every method."""

    def __init__(
        self, strategy: tf.distribute.Strategy, model: Any, trained: Sequence[Any] = (),
        callbacks: Iterable[Any] = (),
    ) -> None:  # fmt: skip
        """Compares the callbacks of the workers, if something is trained."""
        self._exchange = WorkerExchange(strategy)
        self._model, self._trained = model, trained
        names = " ".join(type(callback).__name__ for callback in callbacks)
        self._same = not trained or len(union(strategy, [zlib.crc32(names.encode())])) == 1

    def agree_on_stopping(self, flag: str = "stop_training") -> None:
        """Sets the flag of the model on all workers if it is set on any."""
        if self._exchange.workers > 1:
            wanted = bool(getattr(self._model, flag, False))
            setattr(self._model, flag, any_worker(self._exchange.strategy, wanted, flag))

    def check(self) -> None:
        """Checks that all workers have the same learning rate, and the same weights.

        Compares the weights only if the workers have different callbacks. If a callback of any
        worker has asked to stop, all of them stop.
        """
        if self._exchange.workers == 1:
            return
        rates = [float(tf.convert_to_tensor(t.optimizer.learning_rate)) for t in self._trained]
        variables = [] if self._same else [v for t in self._trained for v in t.variables]
        sums = [float(np.sum(np.asarray(v.numpy()), dtype="float64")) for v in variables]
        # One exchange for both: each waits for the slowest worker.
        stops = float(bool(self._model.stop_training))
        told = self._exchange.floats("an epoch of fit", [*rates, *sums, stops])
        self._model.stop_training = bool(told[:, -1].any())
        near = np.isclose(told, told[:1], rtol=1e-4, atol=1e-7, equal_nan=True)[:, :-1].all(axis=0)
        if not near.all():
            first = int(np.flatnonzero(~near)[0])
            value = f"learning rate {rates[first]:g}" if first < len(rates) else "weights"
            raise ClusterError(
                "Only some workers changed their learning rate or weights, so the replicas no "
                f"longer have one model. Received: {value} of this worker, and others elsewhere. "
                "Give callbacks that change training (ReduceLROnPlateau, LearningRateScheduler, "
                "EarlyStopping, your own) to every worker. Only callbacks that just log may run on "
                "one worker."
            )
