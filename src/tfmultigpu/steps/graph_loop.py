"""A loop of steps in a graph, over the batches of an iterator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.types import Batches, Scalar, Shard, Tensor

# A step: from a batch, and the vectors before it, to those after it.
Step = Callable[[Shard, Sequence[Tensor]], Sequence[Tensor]]
_ANY_SHAPE: Any = None  # Of a tally, whose vectors are scalars of no step.


def loop_over(
    source: Batches, steps: Scalar, step: Step, vectors: Sequence[Tensor], *, never_ends: bool
) -> tuple[Tensor, ...]:
    """Reads each element before its step, which is in a branch if the data may have ended.

    A branch takes in each variable by an operation of its own.

    Args:
        source: TensorFlow's iterator.
        steps: The most steps, an integer scalar.
        step: The step.
        vectors: The vectors before the first step.
        never_ends: Whether the data has no end.

    Returns:
        The vectors after the last step.
    """

    def body(left: Scalar, *vectors: Tensor) -> tuple[Tensor, ...]:
        if never_ends:
            vectors = tuple(step(source.get_next(), vectors))
            with tf.device("CPU:0"):
                return (left - 1, *vectors)
        optional = source.get_next_as_optional()
        more = optional.has_value()
        vectors = tf.cond(more, lambda: step(optional.get_value(), vectors), lambda: vectors)
        with tf.device("CPU:0"):
            return ((left - 1) * tf.cast(more, tf.int32), *vectors)

    # What decides about going on is on the CPU, and loops keep it there in 32 bits: a step would
    # begin only after a GPU had ended the one before.
    with tf.device("CPU:0"):
        left = tf.cast(tf.minimum(steps, tf.int32.max), tf.int32)
    _, *vectors = tf.while_loop(
        lambda left, *_: left > 0,
        body,
        [left, *vectors],
        shape_invariants=[left.shape, *[tf.TensorShape(_ANY_SHAPE)] * len(vectors)],
        parallel_iterations=1,
    )
    return tuple(vectors)
