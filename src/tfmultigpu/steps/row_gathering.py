"""Rows of the global batch on every replica, for losses that compare examples with each other.

Each replica puts its rows at their place among zeros, and one all-reduce adds them: that is a
concatenation of shards of any sizes. Its gradient is TensorFlow's own: what all replicas ask of a
row is added and goes back to the replica that holds it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data.partition import NOT_ROWS
from tfmultigpu.errors import LossError
from tfmultigpu.steps.random_draws import ReplicaRows
from tfmultigpu.strategies.collectives import all_reduce_sum

__all__ = ["GATHERED", "gather_rows", "gathering_from", "global_rows", "row_positions"]
# The scope of the addition that gathers, by which a graph tells that it does.
GATHERED = "gathered_rows_of_replicas"


class _Source(NamedTuple):
    """The rows of the replica that this thread computes.

    Attributes:
        held: Where they are in the global batch.
        micro_batches: Into how many parts each shard is cut, if the rows are one of these parts.
        graph: The graph of the replica. Replicas meet in no other.
    """

    held: ReplicaRows
    micro_batches: Sequence[int] | None
    graph: Any


_thread = threading.local()


@contextmanager
def gathering_from(held: ReplicaRows, micro_batches: Sequence[int] | None = None) -> Iterator[None]:
    """Tells ``gather_rows`` on this thread which rows of the global batch it is called with.

    Args:
        held: The rows this replica computes.
        micro_batches: The number of micro-batches of each replica, if these rows are one of them.
    """
    before = getattr(_thread, "source", None)
    _thread.source = _Source(held, micro_batches, tf.compat.v1.get_default_graph())
    try:
        yield
    finally:
        _thread.source = before


def gather_rows(tensor: Any, *, rows_per_example: int = 1) -> Any:
    """Returns the rows of the global batch, in order and each once, on every replica.

    For a loss that compares the examples of a batch with each other. Call it in a loss
    ``f(y_true, y_pred)`` or in ``forward=f(model, batch, training)`` of a step or of ``fit``.
    Gradients flow back: what all replicas ask of a row is added and goes to the replica that holds
    it. On one replica it returns the tensor itself.

    It sends the global batch of this tensor once forward and once backward, so gather embeddings or
    sums of an example, not images.

    Args:
        tensor: A tensor of numbers whose first axis are the rows of this replica, or a nested
            structure of such tensors.
        rows_per_example: How many consecutive rows of the tensor belong to each example.

    Returns:
        A tensor, or a structure of them, with ``rows of the global batch * rows_per_example`` rows.

    Raises:
        LossError: Called outside a step, with micro-batches, in a function that TensorFlow or XLA
            compiles by itself, or with something that has other rows than the batch.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> tmg.gather_rows(tf.constant([[1.0], [2.0]])).numpy().tolist()
        [[1.0], [2.0]]
    """
    source = _source("gather_rows")
    if source is not None:
        _check_can_meet(source)
    tensors = [_as_rows(one) for one in tf.nest.flatten(tensor)]
    held = None if source is None else source.held
    if held is None or held.are_all:
        return tf.nest.pack_sequence_as(tensor, tensors)
    with tf.device("CPU:0"):  # Decided there; nothing has to wait for a GPU.
        small = held.are_copies(tf.distribute.get_replica_context().num_replicas_in_sync)
    padded = [_among_zeros(held, one, rows_per_example) for one in tensors]
    with tf.name_scope(GATHERED):
        added = all_reduce_sum(tf.distribute.get_replica_context(), padded)
    # With fewer rows than replicas each replica holds all of them, and counts 1 / replicas: the
    # gradient of its copy stays with it.
    gathered = [
        _read(tf.where(small, own, every), one)
        for own, every, one in zip(padded, added, tensors, strict=True)
    ]
    return tf.nest.pack_sequence_as(tensor, gathered)


def row_positions(tensor: Any, *, rows_per_example: int = 1) -> Any:
    """Returns where the rows of this replica are in the global batch.

    The labels of a contrastive loss: ``gather_rows(tensor)`` at these positions is ``tensor``.

    Args:
        tensor: A tensor whose first axis are the rows of this replica.
        rows_per_example: As for ``gather_rows``.

    Returns:
        An int32 tensor of as many positions as ``tensor`` has rows.

    Raises:
        LossError: Called outside a step, or with something that has other rows than the batch.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> tmg.steps.row_positions(tf.constant([[1.0], [2.0]])).numpy().tolist()
        [0, 1]
    """
    source = _source("row_positions")
    tensor = _as_rows(tensor)
    size = tf.shape(tensor)[0]
    held = None if source is None else source.held
    if held is None or held.are_all:
        return tf.range(size)
    first = tf.cast(held.first(), tf.int32) * rows_per_example
    with tf.control_dependencies(_checks(held, tensor, rows_per_example)):
        return first + tf.range(size)


def global_rows(tensor: Any) -> Any:
    """Returns how many rows the global batch has, where a tensor has those of this replica.

    For a loss that is divided by something else than the rows. With micro-batches too these are the
    rows of the global batch.

    Args:
        tensor: A tensor whose first axis are the rows of this replica.

    Returns:
        An int32 scalar.

    Raises:
        LossError: Called outside a step, or with something that has other rows than the batch.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> int(tmg.steps.global_rows(tf.constant([[1.0], [2.0]])))
        2
    """
    source = _source("global_rows")
    tensor = _as_rows(tensor)
    held = None if source is None else source.held
    if held is None or held.are_all:
        return tf.shape(tensor)[0]
    with tf.control_dependencies(_checks(held, tensor, 1)):
        return tf.cast(held.total(), tf.int32)


def _source(name: str) -> _Source | None:
    """The rows of this replica; None where there is no step, but one replica that has them all."""
    source: _Source | None = getattr(_thread, "source", None)
    context = tf.distribute.get_replica_context()
    if source is None:
        if context is not None and context.num_replicas_in_sync == 1:
            return None
        raise LossError(
            f"{name} is called outside a step, where it is not known which rows of the global "
            "batch a replica holds. Call it in the loss or the forward function of a step: "
            "make_train_step(..., forward=f), make_eval_step(..., forward=f), or fit of a model "
            "compiled with loss=f."
        )
    return source


def _check_can_meet(source: _Source) -> None:
    """Checks that the replicas hold a whole batch, and can exchange it."""
    if source.micro_batches is not None:
        raise LossError(
            "A loss that compares all examples of a batch cannot be computed from one micro-batch "
            "at a time: gather_rows would see only the rows of this one. Received: "
            f"micro_batches={_shortest(source.micro_batches)}. Write micro_batches=1, and to save "
            "memory use a smaller global batch or more replicas."
        )
    if source.held.by_xla and not source.held.are_all:
        raise LossError(
            "XLA cannot compile gather_rows, which needs the other replicas in the middle of the "
            "loss. Received: jit_compile=True. Write jit_compile=False."
        )
    if not source.held.are_all and tf.compat.v1.get_default_graph() is not source.graph:
        raise LossError(
            "gather_rows is called in a tf.function, a tf.cond or a loop inside the loss, where "
            "replicas cannot meet. The step compiles the loss anyway: leave out @tf.function, and "
            "call gather_rows before the branch or the loop."
        )


def _shortest(micro_batches: Sequence[int]) -> Any:
    return micro_batches[0] if len(set(micro_batches)) == 1 else tuple(micro_batches)


def _as_rows(value: Any) -> Any:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise LossError(
            "gather_rows takes dense tensors, whose rows have one size. Received: "
            f"{type(value).__name__}. Write value.to_tensor(), or tf.sparse.to_dense(value)."
        )
    tensor = tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool) or dtype.is_quantized:
        raise LossError(
            f"gather_rows takes numbers and truth values. Received: dtype {dtype.name}. Gather "
            "what the loss computes from this, such as the number of each label."
        )
    if tensor.shape.rank == 0:
        raise LossError(
            "gather_rows takes tensors with rows, and this is a single number, which already mixes "
            "the rows of this replica. Gather one value per example and reduce that: "
            "tf.reduce_mean(tmg.gather_rows(values))."
        )
    return tensor


def _among_zeros(held: ReplicaRows, tensor: Any, rows_per_example: int) -> Any:
    """The rows at their place in the global batch, in a dtype in which they can be added."""
    checks = _checks(held, tensor, rows_per_example)
    size, rank = tf.shape(tensor)[0], tf.rank(tensor)
    with tf.device("CPU:0"), tf.control_dependencies(checks):  # Shapes are decided there.
        first = tf.cast(held.first(), tf.int32) * rows_per_example
        total = tf.cast(held.total(), tf.int32) * rows_per_example
        inner = tf.zeros([rank - 1, 2], tf.int32)
        paddings = tf.concat([tf.stack([first, total - first - size])[None], inner], 0)
    padded = tf.pad(tf.cast(tensor, _wire_dtype(tensor.dtype)), paddings)
    padded.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return padded


def _checks(held: ReplicaRows, tensor: Any, rows_per_example: int) -> list[tf.Operation]:
    """Assertions that the tensor has the rows of this replica, and nothing else."""
    size = tf.shape(tensor)[0]
    with tf.device("CPU:0"):
        rows = tf.cast(held.count(), tf.int32)
        right = tf.equal(size, rows * rows_per_example)
        # Not tf.debugging.Assert, which makes two branches of it.
        return [tf.raw_ops.Assert(condition=right, data=[NOT_ROWS, size, rows, rows_per_example])]


def _read(gathered: Any, tensor: Any) -> Any:
    """The rows as they were before they were sent."""
    return tf.cast(gathered, tensor.dtype)


def _wire_dtype(dtype: tf.DType) -> tf.DType:
    """A dtype that every strategy adds, and in which gradients are added without loss."""
    if dtype.is_floating:
        return dtype if dtype.size >= 4 else tf.float32
    return tf.int64
