"""Format of a batch: features, labels and sample weights; its tensors, rows and type specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.data.graph_messages import GraphMessage
from tfmultigpu.errors import DataError
from tfmultigpu.lists import present
from tfmultigpu.types import Scalar, Shard, Tensor

_SAMPLED = 2**16
NO_ROWS = GraphMessage(
    "A batch has no rows. A replica cannot train on it.",
    "",
    "Drop empty batches: dataset.filter(lambda x, y: tf.shape(x)[0] > 0).",
)
ROWS_DIFFER = GraphMessage(
    "The tensors of a batch differ in their number of rows (their first axis), so features and "
    "labels would be paired wrongly.",
    "rows {}",
    "Make batches of single examples, dataset.batch(n), or check what comes before .batch(). If "
    "each example has k rows of another kind, give them an axis of their own: "
    "tf.reshape(u, [rows, k, ...]).",
)
GATHERED = "gathered_rows_of_replicas"  # The scope of the addition: a graph that has it gathers.
NOT_ROWS = GraphMessage(
    "gather_rows takes one row per example of this replica, and this tensor has another number of "
    "rows.",
    "rows, and rows of the batch here {}",
    "Gather each part by itself, such as the two views of an example: "
    "tmg.gather_rows((first, second)), or give k rows of each an axis of their own: "
    "tf.reshape(u, [rows, k, ...]).",
)
NOT_EVEN = GraphMessage(
    "Logical replicas have rows of the global batch by their numbers, and the shards of this batch "
    "were cut otherwise.",
    "shards that begin at rows {}",
    "Give the step the batches of tmg.distribute_dataset(dataset, strategy), without shares.",
)
NOT_ALIKE = GraphMessage(
    "A state of whole numbers or truth values is another one on each logical replica, and it has "
    "no mean.",
    "",
    "Compute it from no rows, as a count of calls; or give it the dtype float32: it then becomes "
    "the mean over the logical replicas; or count rows in a metric.",
)
OTHER_ROWS = GraphMessage(
    "rows and gather_rows are asked in a strategy.run that is called with batches of different "
    "rows: they speak of one batch.",
    "the offsets of the shards of the first batch, then of another {}",
    "Give that strategy.run one batch: zip the datasets before they are distributed, "
    "tmg.distribute_dataset(tf.data.Dataset.zip(first, second), strategy).",
)


def unpack_batch(batch: Shard) -> tuple[Shard, Shard, Shard]:
    """Returns features, labels and sample weights of a batch; None for a missing part.

    A tuple is ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``; anything else is ``x``, as in
    Keras.
    """
    if not isinstance(batch, tuple):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(
            "A batch is x, (x, y) or (x, y, sample_weight).",
            f"a tuple of {len(batch)} elements",
            "Put several inputs into a dict or an inner tuple, or unpack the batch yourself in "
            "forward=f(model, batch, training).",
        )
    x, y, weight = (*batch, None, None)[:3]
    return x, y, weight


def cast_all(tensors: Iterable[Tensor], dtype: tf.DType) -> list[Tensor]:
    """Returns tensors in one dtype."""
    return [tf.cast(tensor, dtype) for tensor in tensors]


def any_rows(leaf: Tensor) -> Any:
    """Returns the type spec of a tensor, or of its spec, with an unknown number of rows."""
    if leaf is None:
        return None
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        leaf = tf.type_spec_from_value(leaf)
    if isinstance(leaf, tf.RaggedTensorSpec):
        spec: Any = leaf
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(leaf, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


def tensors_of(batch: Shard) -> list[Tensor]:
    """Returns the tensors of a batch in the order of ``tf.nest``, leaving out None."""
    return present(tf.nest.flatten(batch))


def _present(batch: Shard) -> list[Tensor]:
    tensors = tensors_of(batch)
    if not tensors:
        raise DataError(
            "The batch holds no tensors.",
            repr(batch),
            "A batch is a tensor or a tuple or dict of tensors, such as (features, labels).",
        )
    return tensors


def structure_of(batch: Shard) -> str:
    """Returns the kinds of containers of a batch or of its type specs, and the names in them.

    Named tuples are equal in Python if their values are, whatever their fields.
    """
    return repr(tf.nest.map_structure(lambda leaf: None if leaf is None else 0, batch))


def digest(batch: Shard, previous: Scalar = 0) -> Scalar:
    """Returns a hash of the shapes and of a sample of each tensor, and of a hash before it."""
    parts = [tf.strings.as_string(previous)]
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None:
            flat = tf.reshape(leaf, [-1])
            # A sample of a large tensor is enough; hashing all of it would take long.
            flat = flat[:: 1 + tf.size(flat, tf.int64) // _SAMPLED]
            parts += [tf.io.serialize_tensor(flat), tf.io.serialize_tensor(tf.shape(leaf))]
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts, "|"), 2**62)


def count_rows(batch: Shard) -> Scalar:
    """Returns the number of rows of a batch, an int64 scalar."""
    return _rows_of(_present(batch)[0])


def _rows_of(tensor: Tensor) -> Scalar:
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(out_type=tf.int64)
    if isinstance(tensor, tf.Tensor) and tensor.shape.rank and tensor.shape[0] is not None:
        return tf.constant(tensor.shape[0], tf.int64)
    # On the device of the tensor, so that it is not copied to be counted. In 32 bits, which GPUs
    # keep in host memory.
    with tf.device(None):
        rows = tf.shape(tensor)[0]
    return tf.cast(rows, tf.int64)


def check_rows_agree(batch: Shard) -> list[tf.Operation]:
    """Returns assertions that all tensors of a batch have the same number of rows, at least one."""
    leaves = _present(batch)
    known = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    if len(known) == 1 and (known.pop() or 0) > 0:
        return []
    # In int32: without a conditional around it, Assert prints only int32 and text.
    rows = tf.stack([tf.cast(_rows_of(leaf), tf.int32) for leaf in leaves])
    agree = tf.reduce_all(rows == rows[0])
    checks = [
        tf.debugging.Assert(agree, [ROWS_DIFFER.text, rows], summarize=100),
        tf.debugging.Assert(rows[0] > 0, [NO_ROWS.text]),
    ]
    return present(checks)


def checked_rows(batch: Shard) -> Shard:
    """Returns a batch whose tensors depend on the assertions of ``check_rows_agree``."""
    checks = check_rows_agree(batch)
    if not checks:
        return batch
    return with_dependencies(checks, batch)


def with_dependencies(operations: Sequence[Any], batch: Shard) -> Shard:
    """Returns a batch whose tensors are computed after some operations."""
    with tf.control_dependencies(operations):
        return tf.nest.map_structure(
            lambda one: None if one is None else tf.identity(one), batch, expand_composites=True
        )


def as_data_error(error: tf.errors.OpError) -> Exception:
    """Returns the DataError that an error of TensorFlow stands for, any other error unchanged.

    That is a failed assertion of ``check_rows_agree``, or a DataError that Python code raised
    inside ``tf.data``.
    """
    message = error.message
    for known in (NO_ROWS, ROWS_DIFFER):
        if known.failed_in(message):
            return known.as_error(DataError, message)
    # TensorFlow keeps only the type and the text of an error of Python, so it stays one text.
    _, is_raised, raised = message.partition("DataError: ")
    if is_raised:
        return DataError(raised.partition("\n")[0])
    converted: Exception = error
    return converted


def lists_to_tuples(batch: Shard) -> Any:
    """Converts lists of arrays to tuples and other lists to arrays; tf.data would stack both."""
    if isinstance(batch, list) and not any(map(holds_arrays, batch)):
        return np.asarray(batch)
    if isinstance(batch, Mapping):
        return {name: lists_to_tuples(item) for name, item in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    items = map(lists_to_tuples, batch)
    if hasattr(batch, "_fields"):
        return type(batch)(*items)
    return tuple(items)


def holds_arrays(item: Any) -> bool:
    """Returns whether an item of a list is an array or a structure of arrays, and not a row."""
    if isinstance(item, (list, tuple)):
        return any(map(holds_arrays, item))
    return isinstance(item, Mapping) or len(getattr(item, "shape", ())) > 0
