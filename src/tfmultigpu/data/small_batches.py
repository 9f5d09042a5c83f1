"""Batches of fewer rows than replicas: whole copies for our steps, a partition for loops of users.

Between ``tf.data`` and a step such a batch is whole on every replica, and counts on the first one
alone. A loop of a user does not know of copies. It sees each row once, as TensorFlow
cuts: one row on the first replicas, none on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, tensors_of
from tfmultigpu.data.graph_messages import GraphMessage
from tfmultigpu.data.partition import are_copies, mark_offsets, marked_offsets, slice_rows
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.marked_runs import COPIES
from tfmultigpu.strategies.topology import local_replicas, per_replica
from tfmultigpu.types import Shard, Tensor

_COMPUTED = GraphMessage(
    "The batch has fewer rows than there are replicas, and a part of it was computed from the "
    "shards of a loop of your own, some of which have no rows. A step needs the whole batch on "
    "each replica.",
    "",
    "Give step(batch) what the dataset yields, and compute before or in the step: "
    "dataset.map(f), or make_train_step(..., forward=f).",
)


def each_row_once(
    batch: Shard, offsets: Tensor, strategy: tf.distribute.Strategy, devices: Sequence[str]
) -> Shard:
    """Returns a batch as a partition of its rows, marked with its offsets, also if it is copies."""
    mark_offsets(batch, offsets)
    replicas = strategy.num_replicas_in_sync
    results = strategy.experimental_local_results
    shards = results(tensors_of(batch)[0])
    if _are_cut(shards, replicas) or (tf.executing_eagerly() and int(offsets[-1]) >= replicas):
        return batch
    local = local_replicas(strategy)
    with tf.device("CPU:0"):
        counts = [count_rows(shard) for shard in shards]
        may_be_small = tf.reduce_all(tf.equal(tf.stack(counts), counts[0])) & (counts[0] < replicas)
        # Offsets on a GPU are read only if they decide: that waits for what was computed before.
        rows = tf.cond(may_be_small, lambda: offsets[-1], lambda: tf.constant(replicas, tf.int64))
        is_small = rows < replicas
        once = tf.minimum(tf.range(replicas + 1, dtype=tf.int64), rows)
        starts, stops = [], []
        for replica, count in zip(local, counts, strict=True):
            starts.append(tf.where(is_small, once[replica], tf.zeros([], tf.int64)))
            stops.append(tf.where(is_small, once[replica + 1], count))
        offsets = tf.where(is_small, once, offsets)

    def cut(whole: Tensor) -> Tensor:
        if whole is None:
            return None
        shards = []
        for device, shard, *ends in zip(devices, results(whole), starts, stops, strict=True):
            with tf.device(device):
                shards.append(slice_rows(shard, *ends))
        shard = per_replica(strategy, shards)
        setattr(shard, COPIES, whole)
        return shard

    return mark_offsets(tf.nest.map_structure(cut, batch), offsets)


def with_whole_shards(leaves: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, list[tf.Operation]]:
    """Returns the leaves of a batch with copies in place of shards without rows."""
    whole: list[Tensor] = []
    copies: list[Tensor] = []
    for leaf in leaves:
        copy = getattr(leaf, COPIES, None)
        if copy is not None:
            copies.append(copy)
        whole.append(leaf if copy is None else copy)
    if not copies:
        return whole, marked_offsets(whole), []
    offsets, checks = marked_offsets(copies), []
    if len(copies) < len(tensors_of(leaves)):
        if tf.executing_eagerly():
            raise _COMPUTED.as_error(DataError)
        checks = [tf.debugging.Assert(tf.logical_not(are_copies(offsets)), [_COMPUTED.text])]
    return whole, offsets, checks


def _are_cut(shards: Sequence[Shard], replicas: int) -> bool:
    """Returns whether their static shapes tell that shards are not copies of a small batch."""
    sizes = {shard.shape[0] for shard in shards if shard.shape.rank} - {None}
    return len(sizes) > 1 or any(size >= replicas for size in sizes)
