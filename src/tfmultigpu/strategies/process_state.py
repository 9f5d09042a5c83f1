"""State of this process that the rooms share: the cluster it has joined, and its strategies."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat


class ProcessState:
    """The cluster that this process has joined, and its strategies of several replicas.

    Attributes:
        cluster: The cluster, as the workers add-on describes it: ``workers``, ``index``,
            ``explaining()``, ``compare(name, value, seconds)`` and ``states(seconds)``. None before
            one is joined.
    """

    def __init__(self) -> None:
        self.cluster: Any = None
        self._has_told_of_gpus = False
        self._forgotten: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()

    def note_joined(self, cluster: Any) -> None:
        """Notes the cluster, which a process joins once."""
        self.cluster = cluster

    def note_without_gpu(self) -> bool:
        """Notes that a strategy has no GPU; returns whether it is the first of the process."""
        is_first, self._has_told_of_gpus = not self._has_told_of_gpus, True
        return is_first

    def forget(self) -> None:
        """Begins anew, for tests: strategies that others still hold do not count."""
        self.cluster, self._has_told_of_gpus = None, False
        self.ignore(*_strategies_of_several_replicas())

    def ignore(self, *strategies: tf.distribute.Strategy) -> None:
        """Leaves strategies out of those that live, for tests."""
        self._forgotten.update(strategies)

    def living_strategies(self) -> tuple[tf.distribute.Strategy, ...]:
        """Returns the strategies of several replicas that somebody still holds.

        It does not matter who made them, nor whether that was before this library was imported:
        TensorFlow keeps no list, so they are looked for among the objects of the process. That
        takes 0.1 s for a million objects, and nothing if no strategy was ever made.
        """
        strategies = _strategies_of_several_replicas()
        living = weakref.WeakSet(strategies) - self._forgotten
        del strategies
        # A model, its steps and their strategy hold each other: the first collection of garbage
        # finds the model, the next ones the steps kept for it.
        for _ in range(3):
            if not living or not gc.collect():
                break
        return tuple(living)


def _strategies_of_several_replicas() -> list[tf.distribute.Strategy]:
    if not _compat.strategies_were_made():
        return []
    kinds = _kinds_of(tf.distribute.Strategy)
    # By ``type``: a lazy proxy of a user computes something when it is asked for its class.
    strategies: list[tf.distribute.Strategy] = [
        value for value in gc.get_objects() if type(value) in kinds
    ]
    # A strategy whose constructor has failed does not know its replicas.
    return [s for s in strategies if getattr(s, "num_replicas_in_sync", 1) > 1]


def _kinds_of(kind: type) -> set[type]:
    """Returns a class and all that inherit from it."""
    kinds = {kind}
    heirs: list[type] = kind.__subclasses__()
    for heir in heirs:
        kinds |= _kinds_of(heir)
    return kinds


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
    if cluster is None:
        yield
        return
    with cluster.explaining():
        yield
