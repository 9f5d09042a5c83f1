"""The times at which the parts of a step end, as a feature that reads the clock between them.

Each part waits for the clock that was read after the part before. So the parts cannot overlap, and
the results stay the same. A GPU computes asynchronously, so one number of each result is fetched
to the host before the clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.data.batch_format import with_dependencies
from tfmultigpu.steps.features import Feature, Gradient, Pass, Phase, Shards
from tfmultigpu.steps.step import TrainStep

__all__ = ["Times", "Timing", "timed"]


class Times(NamedTuple):
    """Times at which the parts of a step ended, in seconds.

    Attributes:
        begin: The batch was ready.
        replicas: Each replica of this process had its gradients.
        reduced: The gradients were reduced, divided and clipped.
        updated: Every variable had its new value.
    """

    begin: float
    replicas: tuple[float, ...]
    reduced: float
    updated: float


class Timing(Feature):
    """Reads the clock between the parts of a step."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Takes the strategy of the step; has read nothing yet."""
        self._strategy = strategy
        self._read: dict[str, float] = {}
        self._replicas = 0

    @property
    def times(self) -> Times:
        """The times of the last step."""
        replicas = tuple(self._read[f"replica {i}"] for i in range(self._replicas))
        read = self._read
        return Times(read["begin"], replicas, read["reduced"], read["updated"])

    def around_phase(self, phase: Phase) -> Phase:
        """Reads the clock before the phase, and when each replica has its gradients."""

        def timed(shards: Shards) -> list[Pass]:
            leaves = tf.nest.flatten(shards.local, expand_composites=True)
            begin = self._clock("begin", [tf.size(leaf) for leaf in leaves if tf.is_tensor(leaf)])
            local = [with_dependencies([begin], rows) for rows in shards.local]
            passes = phase(shards._replace(local=local))
            self._replicas = len(passes)
            # TensorFlow runs stateful functions one after the other, and replicas end at any time.
            # What is not stateful is dropped, unless its result is used.
            ends = [
                self._clock(f"replica {i}", p.addends, in_order=False) for i, p in enumerate(passes)
            ]
            zero = tf.add_n(ends)
            return [
                p.with_addends(
                    [_same(tensor + tf.cast(zero, tensor.dtype)) for tensor in p.addends]
                )
                for p in passes
            ]

        return timed

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Reads the clock when the gradient of the global batch is known."""
        with tf.control_dependencies([self._clock("reduced", gradient.tensors)]):
            return gradient._replace(tensors=tuple(_same(tensor) for tensor in gradient.tensors))

    def after_update(self, gradient: Gradient) -> None:
        """Reads the clock when the variables have their new values."""
        local = self._strategy.experimental_local_results
        copies = [copy for variable in gradient.variables for copy in local(variable.value)]
        self._clock("updated", [_same(copy) for copy in copies])

    def _clock(self, name: str, tensors: Sequence[Any], *, in_order: bool = True) -> Any:
        """Reads the clock once tensors are computed; returns a zero that depends on that."""

        def now(_: Any) -> Any:
            self._read[name] = time.perf_counter()
            return np.float32(0)

        pieces = []
        for tensor in tensors:
            with tf.device(tensor.device or None):  # Sends one number to the host.
                pieces.append(tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32)))
        with tf.device("CPU:0"):
            return tf.numpy_function(now, [tf.add_n(pieces)], tf.float32, stateful=in_order)


def timed(step: TrainStep) -> tuple[TrainStep, Timing]:
    """Returns a train step with the same variables that is timed, and its times."""
    timing = Timing(step.strategy)
    copy: Any = object.__new__(TrainStep)
    vars(copy).update(vars(step), features=(*step.features, timing))
    copy.forget()
    return copy, timing


def _same(tensor: Any) -> Any:
    with tf.device(tensor.device or None):
        return tf.identity(tensor)
