"""What the old core still asks about sharded variables; goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.strategies.collectives import add_on_device, replicas_share_memory
from tfmultigpu.strategies.topology import is_sharded, owner_of

__all__ = ["aggregated", "creating_as_before", "is_sharded", "owner_of"]


@contextmanager
def creating_as_before(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters a scope to create a model in, sharded if an earlier part of the program did that."""
    with getattr(strategy, "tfmultigpu_scope", strategy.scope)():
        yield


def aggregated(value: tf.Tensor, how: tf.VariableAggregation) -> Any:
    """Returns one value for those of all replicas; call it in replica context.

    Args:
        value: The value of this replica.
        how: The way; ``NONE`` takes the value of the first replica.
    """
    context: Any = tf.distribute.get_replica_context()
    kinds = tf.VariableAggregation
    if how in (kinds.NONE, kinds.ONLY_FIRST_REPLICA):
        first = tf.equal(context.replica_id_in_sync_group, 0)
        value, how = tf.where(first, value, tf.zeros_like(value)), kinds.SUM
    if replicas_share_memory(context.strategy):  # A second strategy has the keys of the first.

        def add(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
            parts = strategy.experimental_local_results(value)
            return add_on_device(parts, strategy.extended.worker_devices[0])

        total = context.merge_call(add, args=(value,))
    else:
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    mean = how == kinds.MEAN
    return total / tf.cast(context.num_replicas_in_sync, total.dtype) if mean else total
