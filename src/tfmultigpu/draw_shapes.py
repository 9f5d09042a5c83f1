"""Shapes of random draws: what the graph tells about their first axis while a step is traced."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["as_shape", "is_by_row"]


def as_shape(shape: Any) -> Any:
    """Returns a shape, lengths or a tensor of them, as an int32 vector."""
    if tf.is_tensor(shape):
        return tf.cast(shape, tf.int32)
    lengths = [tf.cast(length, tf.int32) for length in shape]
    return tf.stack(lengths) if lengths else tf.zeros([0], tf.int32)


def is_by_row(shape: Any) -> bool:
    """Returns whether the first axis of a draw has no length yet, while the step is traced.

    Nor is it by row where that length is seen to be the one of another axis of some tensor, as that
    of noise for the positions of a sequence.
    """
    static = tf.broadcast_to(False, shape).shape
    return bool(static.rank) and static[0] is None and _axis_it_is_of(shape) in (0, None)


def _axis_it_is_of(shape: Any) -> int | None:
    """The axis whose length the first axis of a shape has; None where the graph does not tell."""
    first = shape.op.inputs[0] if shape.op.type == "Pack" else shape
    while first.op.type in ("Cast", "Identity"):
        first = first.op.inputs[0]
    if first.op.type != "StridedSlice" or first.op.inputs[0].op.type != "Shape":
        return None
    begin = tf.get_static_value(first.op.inputs[1])
    rank = first.op.inputs[0].shape[0]
    if begin is None or rank is None or begin.size != 1:
        return None
    return int(begin[0]) % int(rank)
