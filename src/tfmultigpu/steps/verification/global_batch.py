"""The global batch put together again from the shards of the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.parts import part_of_each_leaf
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

    def one(name: str | None, *parts: Any) -> Any:
        if parts[0] is None or name is None:  # Nothing, or the same on all replicas.
            return parts[0]
        if several_workers:
            return gather_rows(strategy, per_replica(strategy, list(parts)))
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(list(parts), 0)

    leaves = zip(part_of_each_leaf(local[0]), *map(tf.nest.flatten, local), strict=True)
    return tf.nest.pack_sequence_as(local[0], [one(*leaf) for leaf in leaves])


def first_rows(shards: Shards, rows: int) -> Shards:
    """Returns the first rows of each shard as a smaller global batch.

    Args:
        shards: The global batch, of at least as many rows as there are replicas.
        rows: The most rows of a shard, of each of its parts.
    """
    counts = np.minimum(np.diff(np.asarray(shards.offsets)), rows)
    local = [partition.slice_rows(shard, 0, rows) for shard in shards.local]
    offsets = np.insert(np.cumsum(counts, axis=-1), 0, 0, axis=-1)
    return Shards(local, tf.constant(offsets, tf.int64))


def size_in_bytes(shards: Shards) -> int:
    """Returns the bytes of the tensors of the local shards."""
    leaves = tf.nest.flatten(shards.local, expand_composites=True)
    return sum(
        leaf.shape.num_elements() * max(leaf.dtype.size, 1) for leaf in leaves if leaf is not None
    )
