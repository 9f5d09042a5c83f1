"""The next batch of an iterator, or the end of the data, for loops that decide in a graph."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfmultigpu.data.cut import Cut
from tfmultigpu.types import Shard, Untyped


@dataclasses.dataclass(eq=False)
class NextBatch:
    """The next batch of a ``ShardIterator``, or the end of the data, as TensorFlow's optionals.

    Attributes:
        optional: The underlying ``tf.experimental.Optional``.
        cut: Makes a batch of its value.
    """

    optional: Untyped
    cut: Cut

    def has_value(self) -> tf.Tensor:
        """Returns whether there was a batch, a bool scalar."""
        more: tf.Tensor = self.optional.has_value()
        return more

    def get_value(self) -> Shard:
        """Returns the batch; inside a ``tf.function`` in a branch of ``has_value()`` alone."""
        return self.cut.to_batch(self.optional.get_value())

    def __tf_flatten__(self) -> tuple[tuple[Cut], tuple[Untyped]]:
        """Lets a ``tf.while_loop`` carry it."""
        return (self.cut,), (self.optional,)

    @classmethod
    def __tf_unflatten__(cls, metadata: tuple[Cut], components: tuple[Untyped]) -> NextBatch:
        """Inverts ``__tf_flatten__``."""
        return cls(components[0], metadata[0])
