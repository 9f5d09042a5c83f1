"""The strategies of several replicas that were created, for as long as somebody holds them."""

from __future__ import annotations

import gc
import threading
import weakref

import tensorflow as tf

__all__ = ["living"]


class LivingStrategies:
    """Notes strategies of several replicas without keeping them."""

    def __init__(self) -> None:
        """Begins with none."""
        self._lock = threading.Lock()
        self._strategies: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()

    def note(self, strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
        """Notes a strategy if it has several replicas, and returns it."""
        if strategy.num_replicas_in_sync > 1:
            with self._lock:
                self._strategies.add(strategy)
        return strategy

    def held(self) -> tuple[tf.distribute.Strategy, ...]:
        """Returns the strategies that somebody still holds.

        Collects garbage if there seem to be any. A model, its steps and their strategy hold each
        other: the first collection finds the model, the second one the steps kept for it.
        """
        for _ in range(2):
            if not self._now():
                return ()
            gc.collect()
        return self._now()

    def forget(self) -> None:
        """Begins with none again."""
        with self._lock:
            self._strategies.clear()

    def _now(self) -> tuple[tf.distribute.Strategy, ...]:
        with self._lock:
            return tuple(self._strategies)


living = LivingStrategies()
