"""A few numbers from every worker to every worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.gathering import gather_rows
from tfmultigpu.lost_workers import explaining_lost_workers

__all__ = ["WorkerExchange"]

_SHORTEST = 8


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
        count = own.shape[1]
        # Few different lengths: each is traced once, which takes a second on a busy machine.
        length = max(_SHORTEST, 1 << (count - 1).bit_length()) if count else _SHORTEST
        wide = np.pad(own, [(0, 0), (0, length - count)])
        gathered = self.rows(lambda: wide)
        return np.asarray(gathered[:: self._local, :count], "int64")

    def rows(self, next_rows: Callable[[], Any]) -> np.ndarray[Any, Any]:
        """Returns the rows that all replicas hold, in their order; every worker must call it.

        Args:
            next_rows: Returns the rows of the next replica of this worker, an array.
        """
        spread = self.strategy.experimental_distribute_values_from_function
        with explaining_lost_workers():
            gathered = _gather_of(self.strategy)(spread(lambda _: tf.constant(next_rows())))
        return np.asarray(gathered.numpy())

    def floats(self, values: Iterable[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Tells all workers some numbers, to the bit, and waits for theirs.

        Args:
            values: Floats of 64 bits, as many on every worker.

        Returns:
            Those of all workers, of shape ``[workers, len(values)]``.
        """
        bits = np.asarray(list(values), "float64").view("int64")
        return np.ascontiguousarray(self(bits.tolist())).view("float64")


@functools.lru_cache(maxsize=8)
def _gather_of(strategy: tf.distribute.Strategy) -> Any:
    # Called eagerly, TensorFlow traces each gathering anew. Keeps the strategy: a process joins one
    # cluster, and only once.
    return tf.function(lambda value: gather_rows(strategy, value), autograph=False)
