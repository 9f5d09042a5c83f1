"""A few numbers from every worker to every worker.

An exchange is a collective on purpose: if another worker is in a step or an evaluation meanwhile,
TensorFlow sees two collectives that do not fit together, and both end with an error.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import ClusterError, WorkerLostError
from tfmultigpu.recorder import noting
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.process_state import explaining_lost_workers
from tfmultigpu.strategies.topology import local_replicas
from tfmultigpu.types import Array

_Name = TypeVar("_Name")
_Result = TypeVar("_Result")
_SHORTEST = 8


class ElsewhereError(Exception):
    """Another worker has failed in what all workers do, and this one has not."""


class WorkerExchange:
    """Lets the ``workers`` processes of a strategy tell each other numbers; this is ``worker``."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        local = local_replicas(strategy)
        self.workers = max(1, strategy.num_replicas_in_sync // len(local))
        self.worker = local[0] // len(local)
        self.is_chief = self.worker == 0
        self._local = len(local)

    def __call__(self, purpose: str, numbers: Sequence[int]) -> Array:
        """Returns the numbers of all workers, of shape ``[workers, len(numbers)]``."""
        sent = np.asarray([list(numbers)], "int64")
        if self.workers == 1:
            return sent
        count = sent.shape[1]
        header = [count, digest_of(purpose)]
        # Only a few lengths occur: tracing each takes a second on a busy machine.
        length = max(_SHORTEST, 1 << (count + 1).bit_length())
        wide = np.zeros([1, length], "int64")
        wide[0, : count + 2] = [*header, *sent[0]]
        with noting("exchange", purpose):
            gathered = self.rows(lambda: wide)[:: self._local]
        others = np.flatnonzero((gathered[:, :2] != header).any(axis=1)).tolist()
        if others:
            raise different_calls(
                f"worker {self.worker} was in {purpose}, and workers {others} were elsewhere"
            )
        return np.asarray(gathered[:, 2 : count + 2], "int64")

    def rows(self, next_rows: Callable[[], Array]) -> Array:
        """Returns the rows of all replicas; ``next_rows`` is called once for each local one."""
        if self.workers == 1:
            return np.concatenate([np.asarray(next_rows()) for _ in range(self._local)])
        spread = self.strategy.experimental_distribute_values_from_function
        with explaining_lost_workers():
            gathered = _gather_of(self.strategy)(spread(lambda _: tf.constant(next_rows())))
        return np.asarray(gathered.numpy())

    def together(self, purpose: str, function: Callable[[], _Result]) -> _Result:
        """Returns what a function returns here, if it ends without an error on all workers.

        No worker leaves out what all of them do next because it alone has failed.

        Raises:
            ElsewhereError: The function has failed on other workers alone.
        """
        try:
            result = function()
        except (ClusterError, WorkerLostError):  # The workers are apart already.
            raise
        except Exception:
            self(purpose, [1])
            raise
        if self(purpose, [0]).any():
            raise ElsewhereError(purpose)
        return result

    def floats(self, purpose: str, values: Iterable[float]) -> Array:
        """Returns the floats of all workers, without rounding."""
        bits = np.asarray(list(values), "float64").view("int64")
        return np.ascontiguousarray(self(purpose, bits.tolist())).view("float64")

    def find_difference(
        self, purpose: str, values: Mapping[_Name, object]
    ) -> tuple[_Name, int] | None:
        """Returns the first name whose values differ, and a worker that differs from this one.

        All workers must call it, with the same names; it compares the ``repr`` of the values.
        """
        told = self(purpose, [digest_of(repr(value)) for value in values.values()])
        columns = np.flatnonzero((told != told[0]).any(axis=0))
        if not len(columns):
            return None
        column = int(columns[0])
        other = np.flatnonzero(told[:, column] != told[self.worker, column])[0]
        return list(values)[column], int(other)


def different_calls(received: str) -> ClusterError:
    """Returns the error for workers that made different calls."""
    return ClusterError(
        "The workers do not call the same things in the same order. Another worker was in another "
        "call than the one that raised this error.",
        received,
        "Every worker must make the same steps, evaluations, predictions and checkpoints. Move "
        "them out of blocks such as `if worker == 0:`, which are for printing.",
    )


def digest_of(data: str | bytes) -> int:
    """Returns a hash of less than 64 bits, the same on every machine."""
    encoded = data if isinstance(data, bytes) else data.encode(errors="backslashreplace")
    return int(hashlib.sha256(encoded).hexdigest()[:15], 16)


@functools.cache  # Called eagerly, TensorFlow would trace each gathering anew.
def _gather_of(strategy: tf.distribute.Strategy) -> Any:
    return tf.function(lambda value: gather_rows(strategy, value), autograph=False)
