"""The rows of a replica, and the rows of all replicas, for losses that compare examples.

To gather, each replica puts its rows at their place among zeros, and one all-reduce adds them: that
is a concatenation of shards of any sizes. The gradient is TensorFlow's own: what all replicas ask
of a row is added and goes back to the replica that has it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import sum_dtype
from tfmultigpu.accumulation.losses import rows_of_step
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import GATHERED, NOT_ROWS, OTHER_ROWS, cast_all, count_rows
from tfmultigpu.errors import LossError
from tfmultigpu.steps.sums_of_users import counting_once
from tfmultigpu.steps.values import Rows
from tfmultigpu.strategies.collectives import all_reduce_sum
from tfmultigpu.strategies.marked_runs import mark_of_run
from tfmultigpu.types import Nested, Tensor


@contextmanager
def standing_at(rows: Rows) -> Iterator[None]:
    """Tells ``rows`` and ``gather_rows`` on this thread which rows a replica computes."""
    token = rows_of_step.set(rows)
    try:
        yield
    finally:
        rows_of_step.reset(token)


def rows() -> Rows:
    """Returns which rows of the global batch this replica has.

    In a step, call it in a loss or in ``forward``. In a loop of your own, call it in the function
    given to ``strategy.run``, with a batch of ``distribute_dataset`` among ``args``.

    Returns:
        ``first``, ``count`` and ``total``, int64 scalars: the number of the first row of this
        replica, the number of its rows, and the number of rows of the global batch. ``weight``, a
        float64 scalar: what each row counts, which is 1. If every replica has all rows of a small
        batch, as in a step or by ``small_batches="copy"``, they count 1 on the first replica and 0
        on the others.

    Raises:
        LossError: The batch is not known here.

    Example:
        >>> import numpy as np, tensorflow as tf, tfmultigpu as tmg
        >>> strategy = tf.distribute.get_strategy()
        >>> (batch,) = tmg.distribute_dataset(np.ones((5, 2)), strategy, batch_size=8)
        >>> int(strategy.run(lambda x: tmg.rows().count, args=(batch,)))
        5
    """
    here = _known_rows("rows")
    if here.weight is None:
        return here._replace(weight=tf.ones([], tf.float64))
    return here


def gather_rows(tensor: Tensor) -> Nested:
    """Returns the rows of the global batch, in order and each once, on every replica.

    Use it in a loss that compares the examples of a batch, or in a layer that computes with several
    rows at once. Call it where ``rows`` can be called. Where nothing is cut, as on one device or
    while Keras builds a model, it returns the tensor. The tensor is sent once forward and once
    backward, so gather embeddings or sums, not images.

    Args:
        tensor: A tensor of numbers whose first axis is the rows of this replica, or a nested
            structure of such tensors.

    Returns:
        A tensor, or a structure of them, with the rows of the global batch.

    Raises:
        LossError: The batch is not known, the step has micro-batches, or the tensor has other rows
            than the batch.
        RuntimeError: The call is in a ``tf.function``, ``tf.cond`` or loop inside the loss.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> tmg.gather_rows(tf.constant([[1.0], [2.0]])).numpy().tolist()
        [[1.0], [2.0]]
    """
    context: Any = tf.distribute.get_replica_context()
    alone = _nothing_is_cut(context, tensor)
    here = _rows_here() if alone else _known_rows("gather_rows")
    if here is not None and here.parts is not None:
        raise LossError(
            "gather_rows would see the rows of one micro-batch only.", "", "Write micro_batches=1."
        )
    if alone and here is not None and here.dealt is not None:
        raise LossError(
            "gather_rows would see the rows of one logical replica only: one device computes them "
            "one after the other.",
            "",
            "Leave logical_replicas out; or use as many replicas as logical replicas.",
        )
    tensors = list(map(_as_rows, tf.nest.flatten(tensor)))
    if here is None or alone:
        return tf.nest.pack_sequence_as(tensor, tensors)
    padded = list(map(functools.partial(_among_zeros, here), tensors))
    with tf.name_scope(GATHERED), counting_once(here):
        added = all_reduce_sum(context, padded)
    gathered: list[Tensor] = []
    for every, rows_here in zip(added, tensors, strict=True):
        gathered.append(tf.cast(every, rows_here.dtype))
    return tf.nest.pack_sequence_as(tensor, gathered)


def _nothing_is_cut(context: Any, tensor: Nested) -> bool:
    """Returns whether a tensor has the rows of the global batch already.

    Keras calls the layers of a model for their shapes in the scope, where no replica runs.
    """
    if context is not None:
        return bool(context.num_replicas_in_sync == 1)
    leaves = tf.nest.flatten(tensor)
    return not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves)


def _rows_here() -> Rows | None:
    """The rows of this replica: as a step says, or as in the batch given to ``run``."""
    here: Rows | None = rows_of_step.get()
    context = tf.distribute.get_replica_context()
    if here is not None or context is None:
        return here
    offsets, whole, others = mark_of_run(context.strategy)
    if offsets is None and whole is not None:
        offsets = partition.shard_offsets(count_rows(whole), (1,))
    if offsets is None:
        return None
    number = context.replica_id_in_sync_group
    with tf.device("CPU:0"):
        for other in others:
            offsets = _if_alike(offsets, other)
        total, first = offsets[-1], offsets[number]
        count = partition.shard_bounds(offsets, number)[1] - first
        weight = partition.part_weight(partition.are_copies(offsets), number)
    return Rows(first, count, total, weight)


def _if_alike(offsets: Tensor, other: Tensor) -> Tensor:
    """Returns the offsets of a batch, if another batch has the same ones."""
    same, both = tf.reduce_all(offsets == other), tf.concat([offsets, other], 0)
    if not tf.is_symbolic_tensor(same) and not same:
        raise OTHER_ROWS.as_error(LossError, f"{OTHER_ROWS.text} {both.numpy()}")
    check = tf.raw_ops.Assert(condition=same, data=[OTHER_ROWS.text, both], summarize=64)
    with tf.control_dependencies([check]):
        return tf.identity(offsets)


def _known_rows(function: str) -> Rows:
    here = _rows_here()
    if here is None:
        raise LossError(
            f"tmg.{function} is called where the global batch is not known.",
            "",
            "Call it in the loss or the forward=f of a step, or in strategy.run(f, args=(batch,)) "
            "for batch in tmg.distribute_dataset(...); a tf.function of your own calls "
            "next(iterator).",
        )
    return here


def _as_rows(value: Tensor) -> Tensor:
    tensor, composite = value, isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
    if not composite:
        tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    if composite or not is_number or tensor.shape.rank == 0:
        raise LossError(
            "gather_rows takes dense tensors of numbers or truth values, with a first axis of "
            "rows.",
            f"{type(value).__name__} of dtype {dtype.name} and shape {tensor.shape}",
            "Gather numbers for each example. Rows of a ragged tensor need one width on all "
            "replicas: value.to_tensor(shape=[None, 100]).",
        )
    return tensor


def _among_zeros(here: Rows, tensor: Tensor) -> Tensor:
    """The rows at their place in the global batch, in a dtype in which they can be added."""
    size, rank = tf.shape(tensor)[0], tf.rank(tensor)
    with tf.device("CPU:0"):  # Shapes are decided there.
        first, count, total = cast_all(here[:3], tf.int32)
        # Not tf.debugging.Assert, which makes two branches of it.
        data = [NOT_ROWS.text, tf.stack([size, count])]
        with tf.control_dependencies([tf.raw_ops.Assert(condition=size == count, data=data)]):
            edges = tf.stack([first, total - first - size])
        paddings = tf.concat([edges[None], tf.zeros([rank - 1, 2], tf.int32)], 0)
    dtype = sum_dtype(tensor.dtype) if tensor.dtype.is_floating else tf.int64
    padded = tf.pad(tf.cast(tensor, dtype), paddings)
    padded.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return padded
