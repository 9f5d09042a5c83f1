"""The global batch put together again from the shards of the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import per_replica

__all__ = ["first_rows", "join", "size_in_bytes"]


def join(strategy: tf.distribute.Strategy, shards: Shards) -> Any:
    """Returns all rows of a batch that has at least as many rows as there are replicas.

    Over several workers this is a collective: all of them must call it.

    Raises:
        DataError: Workers cannot send each other its tensors.
    """
    local = shards.local
    if strategy.num_replicas_in_sync == 1:
        return local[0]
    several_workers = len(local) < strategy.num_replicas_in_sync

    def one(*parts: Any) -> Any:
        if parts[0] is None:
            return None
        if several_workers:
            return gather_rows(strategy, per_replica(strategy, list(parts)))
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(list(parts), 0)

    return tf.nest.map_structure(one, *local)


def first_rows(shards: Shards, rows: int) -> Shards:
    """Returns the first rows of each shard as a smaller global batch.

    Args:
        shards: The global batch, of at least as many rows as there are replicas.
        rows: The most rows of a shard.
    """
    counts = np.minimum(np.diff(np.asarray(shards.offsets)), rows)
    local = [partition.slice_rows(shard, 0, rows) for shard in shards.local]
    offsets = np.insert(np.cumsum(counts), 0, 0)
    return Shards(local, tf.constant(offsets, tf.int64))


def size_in_bytes(shards: Shards) -> int:
    """Returns the bytes of the tensors of the local shards."""
    leaves = tf.nest.flatten(shards.local, expand_composites=True)
    return sum(
        leaf.shape.num_elements() * max(leaf.dtype.size, 1) for leaf in leaves if leaf is not None
    )
