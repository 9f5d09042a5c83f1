"""Gathering the rows of all replicas on every worker, in any dtype.

``strategy.gather`` sends float16, float32, float64, int32 and int64 between workers. Other dtypes
that a model may predict travel as one of these, and are read back without loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.errors import DataError
from tfmultigpu.strategies.process_state import explaining_lost_workers

__all__ = ["gather_rows"]


class _Wire(NamedTuple):
    """Conversions of one dtype for sending.

    Attributes:
        write: Converts to a tensor that can be sent, with the same first axis.
        read: Converts back.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def gather_rows(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Returns the rows of all replicas, in their order, on every worker.

    Args:
        strategy: The strategy; call in its cross-replica context.
        value: A per-replica value: dense or ragged tensors of any dtype that models predict, each
            with its rows as first axis. Row counts may differ.

    Raises:
        DataError: The dtype has no lossless form that can be sent.
    """
    with explaining_lost_workers():
        return _gather(strategy, value)


def _gather(strategy: tf.distribute.Strategy, value: Any) -> Any:
    first = strategy.experimental_local_results(value)[0]
    if isinstance(first, tf.RaggedTensor):
        return _gather_ragged(strategy, value)
    if first.shape[1:].num_elements() == 0:
        return _gather_nothing(strategy, value, first)
    if first.dtype == tf.string:
        return _gather_strings(strategy, value)
    wire = _wire_of(first.dtype)
    if wire is None:
        return strategy.gather(value, axis=0)
    return wire.read(strategy.gather(strategy.run(wire.write, args=(value,)), axis=0))


def _wire_of(dtype: Any) -> _Wire | None:
    """Returns how to send a dtype; None if TensorFlow sends it itself."""
    if dtype in (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64):
        return None
    if dtype in (tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16):
        return _Wire(lambda x: tf.cast(x, tf.int32), lambda x: tf.cast(x, dtype))
    if dtype == tf.bfloat16:
        return _Wire(lambda x: tf.cast(x, tf.float32), lambda x: tf.cast(x, dtype))
    if dtype in (tf.uint32, tf.uint64):
        signed = tf.int32 if dtype == tf.uint32 else tf.int64
        return _Wire(lambda x: tf.bitcast(x, signed), lambda x: tf.bitcast(x, dtype))
    if dtype in (tf.complex64, tf.complex128):
        return _Wire(
            lambda x: tf.stack([tf.math.real(x), tf.math.imag(x)], axis=-1),
            lambda x: tf.complex(x[..., 0], x[..., 1]),
        )
    raise DataError(
        "Workers can send predictions that are numbers, text or truth values, and this dtype is "
        f"none of them. Received: {dtype.name}. Cast the output of the model, for example to "
        "float32."
    )


def _gather_strings(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Sends the bytes of all strings as one row of numbers, with the length of each string."""

    def write(strings: Any) -> tuple[Any, Any]:
        # One more byte each, so that there is something to send if every string is empty.
        split = tf.strings.bytes_split(tf.reshape(strings, [-1]) + "|")
        numbers = tf.io.decode_raw(split.flat_values, tf.uint8)[:, 0]
        lengths = tf.reshape(split.row_lengths(), tf.shape(strings))
        return tf.cast(numbers, tf.int32), tf.cast(lengths, tf.int32)

    numbers, lengths = (strategy.gather(one, axis=0) for one in strategy.run(write, args=(value,)))
    flat = tf.reshape(lengths, [-1])
    owner = tf.repeat(tf.range(tf.size(flat)), flat)
    letters = tf.gather(tf.constant([bytes([i]) for i in range(256)]), numbers)
    joined = tf.strings.unsorted_segment_join(letters, owner, tf.size(flat))
    return tf.reshape(tf.strings.substr(joined, tf.zeros_like(flat), flat - 1), tf.shape(lengths))


def _gather_ragged(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Sends the values of all rows as one tensor, and the length of each row."""

    def take_apart(ragged: Any) -> tuple[Any, ...]:
        lengths = [tf.cast(one, tf.int64) for one in ragged.nested_row_lengths()]
        return (ragged.flat_values, *lengths)

    flat, *lengths = strategy.run(take_apart, args=(value,))
    gathered = _gather_some(strategy, flat)
    ragged_tensor: Any = tf.RaggedTensor
    for one in reversed(lengths):
        gathered = ragged_tensor.from_row_lengths(gathered, _gather_some(strategy, one))
    return gathered


def _gather_some(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Gathers tensors, some of which may have no rows: TensorFlow crashes on these."""

    def write(tensor: Any) -> tuple[Any, Any]:
        shape = tf.concat([[1], tf.shape(tensor)[1:]], axis=0)
        padded = tf.concat([tf.zeros(shape, tensor.dtype), tensor], axis=0)
        return padded, tf.pad(tf.zeros(tf.shape(tensor)[:1], tf.int32), [[1, 0]], constant_values=1)

    padded, is_padding = strategy.run(write, args=(value,))
    kept = strategy.gather(is_padding, axis=0) == 0
    return tf.boolean_mask(gather_rows(strategy, padded), kept)


def _gather_nothing(strategy: tf.distribute.Strategy, value: Any, first: Any) -> Any:
    """Gathers rows without elements: only their number can be sent."""
    ones = strategy.run(lambda rows: tf.ones(tf.shape(rows)[:1], tf.int32), args=(value,))
    rows = tf.shape(strategy.gather(ones, axis=0))[:1]
    return tf.zeros(tf.concat([rows, first.shape[1:]], axis=0), first.dtype)
