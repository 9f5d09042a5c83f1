"""Positions of the rows of a replica in a draw for the global batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import DRAW_NOT_ROWS
from tfmultigpu.steps.draw_parts import Segment, segments_of
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
        if held.parts is not None:
            segments = segments_of(shape, tuple(held.parts), by_xla=held.by_xla)
            names = {one.part for one in segments}
            if names <= {None}:  # The same on every replica, as one device draws it.
                return cls(((0, 0, shape[0]),), shape[0])
            if len(names) > 1:
                return cls._of_segments(held, shape[0], segments)
            held = held.parts[segments[0].part]
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

    @classmethod
    def _of_segments(cls, held: Any, size: Any, segments: Sequence[Segment]) -> Places:
        """Returns the places of an axis along which rows of several parts follow each other."""
        with tf.device("CPU:0"):
            fits: list[Any] = []
            lengths = [one.length(fits) for one in segments]
            scale = size // tf.maximum(tf.add_n(lengths), 1)
            fits.append(tf.equal(scale * tf.add_n(lengths), size))
            parts: list[tuple[Any, Any, Any]] = []
            here: Any = 0
            total: Any = 0
            for one, length in zip(segments, lengths, strict=True):
                if one.part is None:
                    first, everywhere = tf.zeros_like(length), length
                else:
                    of_part = held.parts[one.part]
                    count = tf.cast(of_part.count(), tf.int32)
                    times = length // count
                    fits.append(tf.equal(times * count, length))
                    first = tf.cast(of_part.first(), tf.int32) * times
                    everywhere = tf.cast(of_part.total(), tf.int32) * times
                parts.append((here, total + scale * first, scale * length))
                here, total = here + scale * length, total + scale * everywhere
            right = tf.reduce_all(tf.stack(fits))
            # Not tf.debugging.Assert, which makes two branches of it.
            check = tf.raw_ops.Assert(condition=right, data=[DRAW_NOT_ROWS, size])
            with tf.control_dependencies([check]):
                return cls(tuple(parts), tf.identity(total))

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
