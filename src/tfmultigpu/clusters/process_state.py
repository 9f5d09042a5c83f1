"""State of this process that clusters and strategies share: one object with one lock."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from tfmultigpu.clusters.connection import WorkerLink
from tfmultigpu.clusters.exits import Calls
from tfmultigpu.clusters.spec import Cluster

__all__ = ["ProcessState", "process_state"]

_Strategy = TypeVar("_Strategy")
_Value = TypeVar("_Value")


class ProcessState:
    """The cluster that this process has joined, its strategies, and what it keeps for them.

    Methods may be called from any thread.

    Attributes:
        calls: The calls of this process that need all workers.
    """

    def __init__(self) -> None:
        """Begins as a new process does."""
        self._lock = threading.RLock()
        self._ring: tuple[tuple[str, ...], Any] | None = None
        self.forget()

    def forget(self) -> None:
        """Begins anew, for tests. The ring stays: TensorFlow can have only one in a process."""
        with self._lock:
            self.calls = Calls()
            self._cluster: Cluster | None = None
            self._link: WorkerLink | None = None
            self._strategies: weakref.WeakSet[Any] = weakref.WeakSet()
            self._kept: dict[Hashable, Any] = {}

    def join(self, cluster: Cluster, link: WorkerLink | None) -> None:
        """Notes the cluster, and the connections to its other workers."""
        with self._lock:
            self._cluster, self._link = cluster, link

    @property
    def cluster(self) -> Cluster | None:
        """The cluster that this process has joined; None before."""
        return self._cluster

    @property
    def link(self) -> WorkerLink | None:
        """The connections to the other workers; None if ``create_strategy`` made none."""
        return self._link

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
            if not self._noted():
                return ()
            gc.collect()
        return self._noted()

    @property
    def ring_over(self) -> tuple[str, ...] | None:
        """The devices of the ring of this process; None if there is none."""
        ring = self._ring
        return None if ring is None else ring[0]

    def ring(self, devices: tuple[str, ...], create: Callable[[], _Strategy]) -> _Strategy:
        """Returns the ring over these devices, made with ``create`` unless it exists."""
        with self._lock:
            if self._ring is None or self._ring[0] != devices:
                self._ring = devices, create()
            found: _Strategy = self._ring[1]
            return found

    def keep(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Returns what was made for a key, made with ``make`` the first time."""
        if not self.keeps(key):
            made = make()  # Not under the lock: it may take seconds.
            with self._lock:
                self._kept.setdefault(key, made)
        with self._lock:
            found: _Value = self._kept[key]
            return found

    def keeps(self, key: Hashable) -> bool:
        """Returns whether something was made for a key."""
        with self._lock:
            return key in self._kept

    def _noted(self) -> tuple[Any, ...]:
        with self._lock:
            return tuple(self._strategies)


process_state = ProcessState()
