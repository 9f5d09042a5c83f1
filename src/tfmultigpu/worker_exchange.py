"""A few numbers from every worker to every worker."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.lost_workers import explaining_lost_workers

__all__ = ["WorkerExchange", "digest_of", "exchange_of"]


class WorkerExchange:
    """Lets the workers of a strategy tell each other numbers.

    Attributes:
        strategy: The strategy.
        workers: How many processes it runs in.
        worker: Which of them this is; the first is the chief.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Takes the strategy."""
        self.strategy = strategy
        local = rows_lib.local_replicas(strategy)
        self.workers = max(1, strategy.num_replicas_in_sync // len(local))
        self.worker = local[0] // len(local)
        self._local = len(local)

    @property
    def is_chief(self) -> bool:
        """Whether this is the first worker."""
        return self.worker == 0

    def __call__(self, numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tells all workers some numbers, and waits for theirs.

        Args:
            numbers: Whole numbers of 64 bits, as many on every worker.

        Returns:
            Those of all workers, of shape ``[workers, len(numbers)]``.
        """
        own = np.asarray([list(numbers)], "int64")
        if self.workers == 1:
            return own
        spread = self.strategy.experimental_distribute_values_from_function
        with explaining_lost_workers():
            gathered = self._gather(spread(lambda _: tf.constant(own)))
        return np.asarray(gathered.numpy()[:: self._local], "int64")

    def floats(self, values: Iterable[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Tells all workers some numbers, to the bit, and waits for theirs.

        Args:
            values: Floats of 64 bits, as many on every worker.

        Returns:
            Those of all workers, of shape ``[workers, len(values)]``.
        """
        bits = np.asarray(list(values), "float64").view("int64")
        return np.ascontiguousarray(self(bits.tolist())).view("float64")

    def find_difference(self, values: Mapping[str, Any]) -> tuple[str, int] | None:
        """Compares values between the workers, and waits for theirs.

        Args:
            values: The same names on every worker, and values whose ``repr`` says what they are.

        Returns:
            The first name whose value another worker has not, and that worker; None where all are
            equal.
        """
        if self.workers == 1:
            return None
        told = self([digest_of(repr(value)) for value in values.values()])
        for column, name in enumerate(values):
            others = np.flatnonzero(told[:, column] != told[self.worker, column])
            if len(others):
                return name, int(others[0])
        return None

    @functools.cached_property
    def _gather(self) -> Any:
        # Fifteen times as fast as eagerly.
        return tf.function(lambda value: self.strategy.gather(value, axis=0), autograph=False)


def exchange_of(strategy: tf.distribute.Strategy) -> WorkerExchange:
    """Returns the exchange between the workers of a strategy, whose function is traced once."""
    exchange = WorkerExchange(strategy)
    return exchange if exchange.workers == 1 else _of_cluster(strategy)


@functools.lru_cache(maxsize=8)
def _of_cluster(strategy: tf.distribute.Strategy) -> WorkerExchange:
    # Keeps the strategy. A process joins one cluster, and only once.
    return WorkerExchange(strategy)


def digest_of(data: str | bytes) -> int:
    """Returns a number of less than 64 bits that stands for data, the same on every machine."""
    if isinstance(data, str):
        data = data.encode(errors="backslashreplace")
    return int(hashlib.sha256(data).hexdigest()[:15], 16)
