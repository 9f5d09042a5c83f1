"""Gathering the rows of all replicas on every worker, in any dtype.

``strategy.gather`` sends numbers of five dtypes between workers, and crashes on tensors without
elements. Everything else travels as bytes: serialized, sent as int32, and parsed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.strategies.process_state import explaining_lost_workers
from tfmultigpu.types import Array, Shard

_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def gather_rows(
    strategy: tf.distribute.Strategy, value: Shard, *, may_be_empty: bool = False
) -> Shard:
    """Returns the rows of all replicas, in their order, on every worker; call it outside ``run``.

    ``value`` is per replica: dense, ragged or sparse tensors of any dtype. Their row counts may
    differ, and may be zero with ``may_be_empty``.
    """
    first = strategy.experimental_local_results(value)[0]
    with explaining_lost_workers():
        if isinstance(first, tf.RaggedTensor):
            ragged: Any = tf.RaggedTensor
            gather = functools.partial(gather_rows, strategy, may_be_empty=True)
            parts = strategy.run(lambda r: [r.flat_values, *r.nested_row_lengths()], args=(value,))
            flat, *lengths = map(gather, parts)
            return ragged.from_nested_row_lengths(flat, lengths)
        if isinstance(first, tf.SparseTensor):
            return _gather_sparse(strategy, value)
        may_be_empty = may_be_empty or first.shape[1:].num_elements() == 0
        if first.dtype in _SENT and not may_be_empty:
            return strategy.gather(value, axis=0)
        texts = strategy.run(_as_numbers, args=(value,))
        numbers, sizes = strategy.gather(texts[0], axis=0), strategy.gather(texts[1], axis=0)
        with tf.device("CPU:0"):
            sent = tf.numpy_function(_texts, [numbers, sizes], tf.string, stateful=False)
            each = tf.unstack(sent, num=strategy.num_replicas_in_sync)
            rows = tf.concat([tf.io.parse_tensor(text, first.dtype) for text in each], axis=0)
            rows.set_shape([None, *first.shape[1:]])
            return rows


def _gather_sparse(strategy: tf.distribute.Strategy, value: Shard) -> tf.SparseTensor:
    """Gathers sparse tensors, as wide as the widest of them."""

    def parts_of(tensor: tf.SparseTensor) -> tuple[tf.Tensor, ...]:
        return tensor.indices, tensor.values, tf.shape(tensor.values)[:1], tensor.dense_shape[None]

    parts = strategy.run(parts_of, args=(value,))
    gather = functools.partial(gather_rows, strategy, may_be_empty=True)
    indices, values, counts, shapes = map(gather, parts)
    first_rows = tf.repeat(tf.cumsum(shapes[:, 0], exclusive=True), counts)
    indices = tf.concat([indices[:, :1] + first_rows[:, None], indices[:, 1:]], 1)
    rows, widths = tf.reduce_sum(shapes[:, :1], 0), tf.reduce_max(shapes[:, 1:], 0)
    return tf.SparseTensor(indices, values, tf.concat([rows, widths], 0))


def _as_numbers(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a tensor as text, in whole int32 numbers, and the length of that text."""
    with tf.device("CPU:0"):
        text = tf.io.serialize_tensor(tensor)
        size = tf.strings.length(text)
        padded = tf.strings.substr(tf.strings.join([text, "\0\0\0"]), 0, size + 3 & -4)
        return tf.io.decode_raw(padded, tf.int32), size[None]


def _texts(numbers: Array, sizes: Array) -> Array:
    """Returns the text of each replica."""
    parts = np.split(numbers, np.cumsum((sizes + 3) // 4)[:-1])
    texts = [part.tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]
    return np.array(texts, object)
