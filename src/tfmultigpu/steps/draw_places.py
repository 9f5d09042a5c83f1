"""Random draws by row: which draws they are, and where the rows of a replica lie in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

__all__ = ["Places", "as_shape", "is_by_row"]


def as_shape(shape: Any) -> Any:
    """Returns a shape, lengths or a tensor of them, as an int32 vector."""
    if tf.is_tensor(shape):
        return tf.cast(shape, tf.int32)
    lengths = [tf.cast(length, tf.int32) for length in shape]
    return tf.stack(lengths) if lengths else tf.zeros([0], tf.int32)


def is_by_row(shape: Any) -> bool:
    """Returns whether the first axis of a draw has no length yet, while the step is traced.

    A draw is not by row if the graph shows that this length is the one of another axis, as that of
    noise for the positions of a sequence.
    """
    static = tf.broadcast_to(False, shape).shape
    return bool(static.rank) and static[0] is None and _axis_of(shape) in (0, None)


def _axis_of(shape: Any) -> int | None:
    """Returns the axis of a tensor whose length the first axis has; None where unknown."""
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


@dataclasses.dataclass(frozen=True)
class Places:
    """Position of a first axis in that of the global batch.

    Several places belong to one row if the axis is a multiple of the rows. They are taken to follow
    each other, as in ``[rows * steps, ...]``.

    Attributes:
        first: Where the axis begins in the global batch, an int32 scalar.
        size: The length of the axis here, an int32 scalar.
        total: The length of the axis of the global batch, an int32 scalar.
    """

    first: Any
    size: Any
    total: Any

    @classmethod
    def of(cls, held: Any, shape: Any) -> Places:
        """Returns the places of the first axis of a shape.

        An axis that is not a multiple of the rows when it runs is taken as it is.

        Args:
            held: The rows of the replica.
            shape: The shape of a draw here, an int32 vector.
        """
        size = shape[0]
        with tf.device("CPU:0"):  # Shapes are decided there; nothing has to wait for a GPU.
            count = tf.cast(held.count(), tf.int32)
            times: Any = tf.where(size % count == 0, size // count, 0)
            first = tf.cast(held.first(), tf.int32) * times
            total = tf.where(times > 0, tf.cast(held.total(), tf.int32) * times, size)
            return cls(first, size, total)

    def cut(self, drawn: Any) -> Any:
        """Returns the rows of the replica from a draw for all."""
        inner, zeros = tf.shape(drawn)[1:], [0] * (drawn.shape.rank - 1)
        return tf.slice(drawn, tf.stack([self.first, *zeros]), tf.concat([[self.size], inner], 0))

    def spread(self, tensor: Any, filling: Any) -> Any:
        """Puts rows where they are in the global batch; the others, not here, are filled."""
        widths = [
            [self.first, self.total - self.first - self.size],
            *([[0, 0]] * (tensor.shape.rank - 1)),
        ]
        return tf.pad(tensor, widths, constant_values=filling)
