"""What workers must decide alike, because the next step is a collective that all must join."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.accumulation import all_reduce_sum
from tfmultigpu.lost_workers import explaining_lost_workers

__all__ = ["is_chief", "of_chief", "on_any", "several_workers"]


def several_workers(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether other processes take part."""
    return bool(len(rows_lib.local_replicas(strategy)) < strategy.num_replicas_in_sync)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process has the first replica."""
    return 0 in rows_lib.local_replicas(strategy)


def of_chief(strategy: tf.distribute.Strategy, value: float) -> float:
    """Returns the number that the chief calls this with; all workers must call it."""
    return _sum(strategy, value if is_chief(strategy) else 0.0)


def on_any(strategy: tf.distribute.Strategy, truth: bool) -> bool:
    """Returns whether it is true on any worker; all workers must call it."""
    return _sum(strategy, float(truth)) > 0


def _sum(strategy: tf.distribute.Strategy, value: float) -> float:
    if not several_workers(strategy):
        return value

    def add(tensor: Any) -> Any:
        return all_reduce_sum(tf.distribute.get_replica_context(), [tensor])[0]

    # Every replica of a worker adds the same, hence the division; float64 holds seeds exactly.
    local = len(rows_lib.local_replicas(strategy))
    with explaining_lost_workers():
        summed = strategy.run(add, args=(tf.constant([value / local], tf.float64),))
        return float(strategy.experimental_local_results(summed)[0][0])
