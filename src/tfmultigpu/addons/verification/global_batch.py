"""The global batch put together again from the shards of the replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.topology import local_replicas, per_replica

__all__ = ["counts_of", "first_rows", "join", "size_in_bytes"]


def counts_of(batch: Any, replicas: int) -> list[int]:
    """Returns how many rows each replica has of a batch, as ``Program.call`` takes it."""
    structure, local, offsets = batch
    if offsets is not None:
        return np.diff(offsets).tolist()  # type: ignore[no-any-return]
    rows = int(count_rows(tf.nest.pack_sequence_as(structure, local[0])))
    return [rows // replicas + (number < rows % replicas) for number in range(replicas)]


def join(strategy: tf.distribute.Strategy, shards: list[Any]) -> Any:
    """Returns all rows of a batch that has at least as many rows as there are replicas.

    Over several workers this is a collective: all of them must call it.

    Raises:
        DataError: Workers cannot send each other its tensors.
    """
    several_workers = len(shards) < strategy.num_replicas_in_sync

    def joined(*parts: Any) -> Any:
        if parts[0] is None or strategy.num_replicas_in_sync == 1:
            return parts[0]
        if several_workers:
            return gather_rows(strategy, per_replica(strategy, list(parts)))
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(list(parts), 0)

    return tf.nest.map_structure(joined, *shards)


def first_rows(
    strategy: tf.distribute.Strategy, shards: list[Any], offsets: Any, most: int
) -> tuple[list[Any], Any]:
    """Returns up to ``most`` rows of each shard as a smaller global batch, and its offsets."""
    counts = np.minimum(np.diff(offsets), most)
    local = [
        partition.slice_rows(shard, 0, int(counts[number]))
        for number, shard in zip(local_replicas(strategy), shards, strict=True)
    ]
    return local, tf.constant(np.insert(np.cumsum(counts), 0, 0), tf.int64)


def size_in_bytes(shards: list[Any]) -> int:
    """Returns the bytes of the tensors of the local shards."""
    leaves = tf.nest.flatten(shards, expand_composites=True)
    return sum(
        leaf.shape.num_elements() * max(leaf.dtype.size, 1) for leaf in leaves if leaf is not None
    )
