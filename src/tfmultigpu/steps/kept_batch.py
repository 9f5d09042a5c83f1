"""The batch that a loop computes, kept until it has: for an error that TensorFlow loses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.steps.traced_once import packed, spec_of, tensors_in


class KeptBatch:
    """An element of data, in a queue for one, from before a step until after it.

    Tensors are kept, not copied: replicas share memory. Of a step that fails the element stays.
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
