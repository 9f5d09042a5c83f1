"""Cuts a batch into parts by rows, so that no part is ever empty.

A *row* is one example: one index of the first axis of every tensor of a batch. One rule holds for
the shards of a global batch and for the micro-batches of a shard:

- with at least as many rows as parts, each row is in exactly one part and no part is empty;
- with fewer rows than parts, every part is the whole batch: the first counts, the others do not.

Layers crash or return NaN for zero rows, and padding would spoil sums and batch statistics. Loops
of users know nothing of such copies: see ``small_batches``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows, tensors_of
from tfmultigpu.strategies.marked_runs import OFFSETS, WHOLE
from tfmultigpu.types import Scalar, Shard, Tensor

_FIXED = "_tfmultigpu_fixed_offsets"  # An attribute of the first tensor of a batch.


def row_offsets(rows: Scalar, shares: Sequence[int]) -> Tensor:
    """Returns the offsets at which the parts of a batch begin, then its rows: an int64 vector."""
    parts = len(shares)
    rows = tf.cast(rows, tf.int64)
    index = np.arange(parts + 1)
    if len(set(shares)) == 1:
        # With rows >= parts every part has a row.
        return rows * index // parts
    ends = tf.cumsum([0, *shares])
    total = sum(shares)
    ideal = (rows * tf.cast(ends, tf.int64) + total // 2) // total
    # If a small share rounds to nothing, push the ends apart by one row, from the left ...
    slack = tf.linalg.band_part(tf.ones([parts + 1, parts + 1], tf.bool), -1, 0)
    pushed = tf.reduce_max(tf.where(slack, (ideal - index)[None, :], tf.int64.min), axis=1) + index
    # ... and from the right, if that runs past the end.
    return tf.minimum(pushed, rows - (parts - index))


def shard_offsets(rows: Scalar, shares: Sequence[int]) -> Tensor:
    """Returns the offsets of the replicas' shards in the global batch, then its rows."""
    rows, parts = tf.cast(rows, tf.int64), len(shares)
    if parts == 1:
        return tf.stack([tf.zeros_like(rows), rows])
    copies = rows * np.repeat([0, 1], [parts, 1])
    return tf.where(rows < parts, copies, row_offsets(tf.maximum(rows, parts), shares))


def are_copies(offsets: Tensor) -> Scalar:
    """Returns whether each of the shards with these offsets is the whole batch, a bool scalar.

    The offsets of copies are zeros before the last. In a partition the first shard has a row.
    """
    return tf.equal(offsets[1], 0)


def shard_bounds(offsets: Tensor, shard: int) -> tuple[Scalar, Scalar]:
    """Returns the first row of a shard in the global batch, and the row after its last."""
    return offsets[shard], tf.where(are_copies(offsets), offsets[-1], offsets[shard + 1])


def part_weight(copies: Scalar, part: Scalar) -> Scalar:
    """Returns the weight of each row of a part, a float64 scalar: of copies the first counts.

    Args:
        copies: Whether each part is the whole batch, a bool scalar.
        part: The number of the part.
    """
    one = tf.ones([], tf.float64)
    return tf.where(copies, tf.cast(tf.equal(part, 0), tf.float64), one)


def cut_rows(batch: Shard, offsets: Tensor, parts: Sequence[int]) -> list[Shard]:
    """Returns some of the shards that ``shard_offsets`` are for, with memory of their own.

    Into the memory of a slice TensorFlow 2.21 writes even where it is NumPy's, as of a batch that a
    generator yields: the array of the user would change.
    """
    if offsets.shape[0] == 2:
        return [batch]
    # Few operations: tf.data prepares each of them anew for every iterator.
    starts = tf.unstack(offsets[:-1])
    stops = tf.unstack(tf.where(are_copies(offsets), offsets[-1], offsets[1:]))
    shards: list[Shard] = []
    for part in parts:
        cut = functools.partial(
            _copied_rows, starts[part], stops[part], tf.range(starts[part], stops[part])
        )
        shards.append(tf.nest.map_structure(cut, batch))
    return shards


def _copied_rows(start: Scalar, stop: Scalar, rows: Tensor, tensor: Tensor) -> Tensor:
    if isinstance(tensor, tf.SparseTensor):
        return slice_rows(tensor, start, stop)
    return take_rows(tensor, rows)


def cut_part(batch: Shard, parts: Scalar, part: Scalar) -> Shard:
    """Returns one of ``parts`` nearly equal parts of a batch; all of it if it has fewer rows."""
    with tf.device("CPU:0"):  # Shapes are computed there, so that nothing waits for a GPU.
        bounds = part_bounds(count_rows(batch), parts, part)
        start, stop = (tf.cast(bound, tf.int32) for bound in bounds)
    return slice_rows(batch, start, stop)


def part_bounds(rows: Scalar, parts: Scalar, part: Scalar) -> tuple[Scalar, Scalar]:
    """Returns the first row of a part and the row after its last, as ``cut_part`` cuts."""
    part = tf.cast(part, tf.int64)
    whole = rows < parts
    start = tf.where(whole, tf.zeros_like(rows), rows * part // parts)
    return start, tf.where(whole, rows, rows * (part + 1) // parts)


def counting_parts(rows: Scalar, parts: Scalar) -> Scalar:
    """Returns how many parts of so many rows count, an int64 scalar: of copies one."""
    return tf.where(rows < parts, tf.ones([], tf.int64), parts)


def slice_rows(batch: Shard, start: Scalar, stop: Scalar) -> Shard:
    """Returns rows ``start`` up to, not including, ``stop`` of every tensor of a batch."""

    def slice_tensor(tensor: Tensor) -> Tensor:
        if isinstance(tensor, tf.SparseTensor):
            first, last = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
            columns = tensor.dense_shape[1:]
            begin = tf.concat([[first], tf.zeros_like(columns)], 0)
            size = tf.concat([[last - first], columns], 0)
            return _with_known_columns(tf.sparse.slice(tensor, begin, size), tensor)
        if tensor is None:
            return None
        return tensor[start:stop]

    return tf.nest.map_structure(slice_tensor, batch)


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows of a dense, ragged or sparse tensor, in a new order; None stays None."""
    if tensor is None:
        return None
    if not isinstance(tensor, tf.SparseTensor):
        return tf.gather(tensor, rows)
    count = tf.size(rows, tf.int64)
    # For each old row its new place, from 1 on; 0 if it is not taken.
    places = tf.scatter_nd(rows[:, None], tf.range(1, count + 1), tensor.dense_shape[:1])
    place = tf.gather(places, tensor.indices[:, 0])
    taken = place > 0
    indices = tf.concat([place[:, None] - 1, tensor.indices[:, 1:]], 1)
    part = tf.SparseTensor(
        tf.boolean_mask(indices, taken),
        tf.boolean_mask(tensor.values, taken),
        tf.concat([[count], tensor.dense_shape[1:]], 0),
    )
    return _with_known_columns(tf.sparse.reorder(part), tensor)


def _with_known_columns(part: Tensor, tensor: Tensor) -> Tensor:
    """Tells the static number of columns, which slicing drops and a layer builds its weights by."""
    if tensor.shape.rank is not None:
        part.set_shape([None, *tensor.shape[1:]])
    return part


def mark_offsets(batch: Shard, offsets: Tensor = None) -> Shard:
    """Marks the shards of a batch with the result of ``shard_offsets``; None: all rows are here.

    The mark is an attribute of each tensor, so every part of an unpacked batch keeps it. A
    ``tf.function`` rebuilds its arguments and so drops it.
    """
    for leaf in tensors_of(batch):
        if offsets is None:
            setattr(leaf, WHOLE, True)
        else:
            setattr(leaf, OFFSETS, offsets)
    return batch


def marked_offsets(batch: Shard) -> Tensor:
    """Returns the offsets that these shards are marked with; None if unmarked."""
    for leaf in tf.nest.flatten(batch):
        offsets = getattr(leaf, OFFSETS, None)
        if offsets is not None:
            return offsets
    return None


def mark_fixed(leaf: Tensor, offsets: tuple[int, ...] | None) -> None:
    """Marks the first tensor of a batch with the offsets, if all batches of the data have them."""
    if offsets is not None:
        setattr(leaf, _FIXED, offsets)


def fixed_offsets(leaf: Tensor) -> tuple[int, ...] | None:
    """Returns the offsets that all batches of some data have, of the first tensor of one."""
    return getattr(leaf, _FIXED, None)
