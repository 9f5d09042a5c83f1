"""Positions of the rows of a replica in a draw for the global batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfmultigpu.steps.draw_shapes import passes_of

__all__ = ["Places"]


@dataclasses.dataclass(frozen=True)
class Places:
    """Position of a first axis in that of the global batch.

    Attributes:
        parts: One for each pass through the rows: where it begins here, where there, its length.
        total: The length of the axis of the global batch, an int32 scalar.
    """

    parts: tuple[tuple[Any, Any, Any], ...]
    total: Any

    @classmethod
    def of(cls, held: Any, shape: Any) -> Places:
        """Returns the places of the first axis of a shape.

        Where it is not a multiple of the rows when it runs, it is taken as it is.

        Args:
            held: The rows of the replica.
            shape: The shape of a draw here, an int32 vector.
        """
        size, passes = shape[0], passes_of(shape)
        with tf.device("CPU:0"):  # Shapes are decided there; nothing has to wait for a GPU.
            count = tf.cast(held.count(), tf.int32)
            times: Any = tf.where(size % count == 0, size // count, 0)
            first = tf.cast(held.first(), tf.int32) * times
            total = tf.where(times > 0, tf.cast(held.total(), tf.int32) * times, size)
            if passes == 1:
                return cls(((0, first, size),), total)
            fits = (times > 0) & (times % passes == 0)
            parts: list[Any] = []
            for i in range(passes):
                whole = (size if i else 0, first + size if i else first, 0 if i else size)
                one = (i * (size // passes), (i * total + first) // passes, size // passes)
                parts.append(tuple(tf.where(fits, *both) for both in zip(one, whole, strict=True)))
            return cls(tuple(parts), total)

    def cut(self, drawn: Any) -> Any:
        """Returns the rows of the replica from a draw for all."""
        inner, zeros = tf.shape(drawn)[1:], [0] * (drawn.shape.rank - 1)
        return _join(
            [
                tf.slice(drawn, tf.stack([there, *zeros]), tf.concat([[length], inner], 0))
                for _, there, length in self.parts
            ]
        )

    def spread(self, tensor: Any, filling: Any) -> Any:
        """Puts rows where they are in the global batch; the others, not here, are filled."""
        inner = [[0, 0]] * (tensor.shape.rank - 1)
        padded, end = [], 0
        for i, (here, there, length) in enumerate(self.parts):
            after = self.total - there - length if i == len(self.parts) - 1 else 0
            part = tensor[here : here + length] if len(self.parts) > 1 else tensor
            widths = [[there - end, after], *inner]
            padded.append(tf.pad(part, widths, constant_values=filling))
            end = there + length
        return _join(padded)


def _join(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
