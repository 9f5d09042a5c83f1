"""A loop of steps in a graph over the batches of an iterator, and the batch that it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.steps.traced_once import packed, spec_of, tensors_in
from tfmultigpu.types import Batches, Scalar, Shard, Tensor

# A step: from a batch, and the vectors before it, to those after it.
Step = Callable[[Shard, Sequence[Tensor]], Sequence[Tensor]]
_ANY_SHAPE: Any = None
VECTOR: Any = tf.TensorSpec(_ANY_SHAPE, tf.float64)  # Of a tally; of no step it is a scalar.


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
        shape_invariants=[left.shape, *[VECTOR.shape] * len(vectors)],
        parallel_iterations=1,
    )
    return tuple(vectors)


class KeptBatch:
    """The element of data that a loop computes, kept for an error that TensorFlow loses.

    It is in a queue for one, from before a step until after it. Tensors are kept, not copied:
    replicas share memory. The element of a step that fails stays.
    """

    def __init__(self, element: Any) -> None:
        """Begins with an element, inside a ``tf.function``: give ``element`` to the step."""
        self._before = tensors_in(element)
        self._after = [tf.identity(tensor) for tensor in self._before]
        self.element = packed(element, self._after)
        self._structure = tf.nest.map_structure(spec_of, element)

    def until(self, results: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Keeps the element until there are these results of the step; returns them."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(1, [tensor.dtype for tensor in self._before])
        put = self._queue.enqueue(self._before)
        for tensor in self._after:
            _compat.add_control_inputs(tensor.op, [put])
        with tf.control_dependencies(results):
            taken = self._queue.dequeue()
        with tf.control_dependencies(tf.nest.flatten(taken)):
            return tuple([tf.identity(result) for result in results])

    def take(self) -> list[Any]:
        """Returns the element of a step that has failed, and keeps it no longer; [] if none has."""
        if not int(self._queue.size()):
            return []
        tensors = tf.nest.flatten(self._queue.dequeue())
        return [packed(self._structure, tensors)]
