"""State of this process that the rooms share: the cluster it has joined, and its strategies."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

_Strategy = TypeVar("_Strategy")


class ProcessState:
    """The cluster that this process has joined, and its strategies of several replicas.

    Attributes:
        cluster: The cluster, as the workers add-on describes it: ``workers``, ``index``,
            ``explaining()`` and ``compare(name, value, seconds)``. None before one is joined.
    """

    def __init__(self) -> None:
        """Begins as a new process does."""
        self.forget()

    def forget(self) -> None:
        """Begins anew, for tests."""
        self.cluster: Any = None
        self._strategies: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()  # Of the set, which threads may fill while others read.

    def note(self, strategy: _Strategy) -> _Strategy:
        """Notes a strategy if it has several replicas, without keeping it, and returns it."""
        if getattr(strategy, "num_replicas_in_sync", 1) > 1:
            with self._lock:
                self._strategies.add(strategy)
        return strategy

    def living_strategies(self) -> tuple[Any, ...]:
        """Returns the strategies of several replicas that somebody still holds.

        Collects garbage if there seem to be any. A model, its steps and their strategy hold each
        other: the first collection finds the model, the next ones the steps kept for it.
        """
        for _ in range(3):
            if not len(self._strategies):
                return ()
            gc.collect()
        with self._lock:
            return tuple(self._strategies)


process_state = ProcessState()


@contextlib.contextmanager
def explaining_lost_workers() -> Iterator[None]:
    """Turns TensorFlow's error for a lost worker into one that names it.

    Put it around the calls of your own loop that communicate. Steps and loops use it.

    Raises:
        WorkerLostError: Another worker has ended; the message says which one, how, and what to do.
        ClusterError: Another worker made a different call.

    Example:
        >>> import tensorflow as tf
        >>> with explaining_lost_workers():
        ...     total = tf.distribute.get_strategy().reduce("SUM", tf.ones([]), axis=None)
    """
    cluster = process_state.cluster
    with contextlib.nullcontext() if cluster is None else cluster.explaining():
        yield
