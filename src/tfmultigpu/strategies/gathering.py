"""Gathering the rows of all replicas on every worker, in any dtype.

``strategy.gather`` sends numbers of five dtypes between workers, and crashes on tensors without
elements. Everything else travels as bytes: serialized, sent as int32, and parsed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.strategies.process_state import explaining_lost_workers

_SENT = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def gather_rows(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Returns the rows of all replicas, in their order, on every worker.

    Args:
        strategy: The strategy; call in its cross-replica context.
        value: A per-replica value: dense or ragged tensors of any dtype, each with its rows as
            first axis. Row counts may differ.
    """
    first = strategy.experimental_local_results(value)[0]
    is_ragged = isinstance(first, tf.RaggedTensor)
    with explaining_lost_workers():
        if not is_ragged and first.dtype in _SENT and first.shape[1:].num_elements() != 0:
            return strategy.gather(value, axis=0)
        parts = _gather_bytes(strategy, value, first.ragged_rank + 1 if is_ragged else 1)
        flat, *lengths = [tf.concat(part, axis=0) for part in parts]
        ragged: Any = tf.RaggedTensor
        return ragged.from_nested_row_lengths(flat, lengths) if is_ragged else flat


def _gather_bytes(strategy: tf.distribute.Strategy, value: Any, count: int) -> list[list[Any]]:
    """Gathers the components of a value, each of all replicas."""
    first = strategy.experimental_local_results(value)[0]

    def components(one: Any) -> list[Any]:
        ragged = isinstance(one, tf.RaggedTensor)
        return [one.flat_values, *one.nested_row_lengths()] if ragged else [one]

    def write(one: Any) -> tuple[Any, Any]:
        with tf.device("CPU:0"):
            texts = tf.stack([tf.io.serialize_tensor(part) for part in components(one)])
            sizes = tf.strings.length(texts)
            whole = tf.strings.join([tf.strings.reduce_join(texts), "\0\0\0"])
            whole = tf.strings.substr(whole, 0, tf.reduce_sum(sizes) + 3 & -4)
            return tf.io.decode_raw(whole, tf.int32), sizes

    def read(numbers: Any, sizes: Any) -> Any:
        """Cuts what came from all replicas into the texts that were sent; a row each."""
        texts, data, at = [], numbers.tobytes(), 0
        for own in sizes.reshape(-1, count):
            ends = at + np.cumsum(own)
            texts.append([data[end - size : end] for end, size in zip(ends, own, strict=True)])
            at = (ends[-1] + 3) // 4 * 4
        return np.array(texts, object)

    numbers, sizes = (strategy.gather(part, axis=0) for part in strategy.run(write, args=(value,)))
    replicas = strategy.num_replicas_in_sync
    with tf.device("CPU:0"):
        texts = tf.numpy_function(read, [numbers, sizes], tf.string, stateful=False)
        texts.set_shape([replicas, count])
        gathered = []
        for c, part in enumerate(components(first)):
            parsed = [tf.io.parse_tensor(texts[r, c], part.dtype) for r in range(replicas)]
            for one in parsed:
                one.set_shape([None, *part.shape[1:]])
            gathered.append(parsed)
    return gathered
