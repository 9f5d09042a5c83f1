"""A train step that reads the clock between its parts.

The clock is read inside the step's own ``tf.function``, by operations that wait for the part before
and that the part after waits for. So the parts cannot overlap as they do otherwise; what is
computed is the same. On a GPU, whose work runs behind the program's back, one number of each result
is fetched to the host before the clock is read.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.steps.batch_function import Shards
from tfmultigpu.steps.forward_backward import PhaseResult
from tfmultigpu.steps.train_step import Reduced, TrainStep
from tfmultigpu.strategies.topology import per_replica

__all__ = ["ClockedStep", "Times"]

_TIMES = "times"


class Times(NamedTuple):
    """When the parts of a step ended, in seconds.

    Attributes:
        begin: The batch was there.
        replicas: Each replica of this process had its gradients.
        reduced: They were added, divided and clipped.
        updated: Every variable had its new value.
    """

    begin: float
    replicas: tuple[float, ...]
    reduced: float
    updated: float


class ClockedStep(TrainStep):
    """The same train step, with the same variables, and times in its logs."""

    def __init__(self, step: TrainStep) -> None:
        """Takes a train step; it may go on training, too."""
        vars(self).update(vars(step))
        self._functions = {}
        self._phase: Any = _ClockedPhase(self._phase, self.strategy)
        whole, update = self._step, self._update
        vars(self).update(
            _step=functools.partial(self._with_times, whole),
            _update=functools.partial(self._between_clocks, update),
        )
        self._ends: list[Any] = []
        self._use(self._what_is_frozen())

    def timed(self, batch: Any) -> tuple[dict[str, Any], Times]:
        """Trains on one batch; returns the logs and when the parts ended."""
        logs = self(batch)
        begin, *replicas, reduced, updated = np.asarray(logs.pop(_TIMES)).tolist()
        return logs, Times(begin, tuple(replicas), reduced, updated)

    def _with_times(self, whole: Callable[..., Any], shards: Shards) -> dict[str, Any]:
        self._ends = []
        logs = whole(shards)
        return {**logs, _TIMES: tf.stack([*self._phase.times, *self._ends])}

    def _between_clocks(
        self, update: Callable[..., Any], found: Reduced, after: Sequence[Any]
    ) -> None:
        tensors = [list(self.strategy.experimental_local_results(one)) for one in found.gradients]
        reduced = _clock([one for parts in tensors for one in parts])
        self._ends.append(reduced)
        waiting = [
            [_after(reduced, one) for one in parts] if len(parts) > 1 else _after(reduced, parts[0])
            for parts in tensors
        ]
        gradients = [
            per_replica(self.strategy, one) if isinstance(one, list) else one for one in waiting
        ]
        update(dataclasses.replace(found, gradients=gradients), after)
        values = [reduced]
        for variable in found.variables:
            for copy in self.strategy.experimental_local_results(variable.value):
                with tf.device(copy.device):
                    values.append(tf.identity(copy))
        self._ends.append(_clock(values))


class _ClockedPhase:
    """The replica phase, and when it began and each replica ended."""

    def __init__(self, phase: Any, strategy: tf.distribute.Strategy) -> None:
        self.phase = phase
        self.strategy = strategy
        self.times: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.phase, name)

    def __call__(self, shards: Shards, loss_scale: Any) -> PhaseResult:
        leaves = tf.nest.flatten(shards.local, expand_composites=True)
        begin = _clock([tf.size(leaf) for leaf in leaves if tf.is_tensor(leaf)])
        with tf.control_dependencies([begin]):
            result: PhaseResult = self.phase(shards, loss_scale)
        ends = [_clock(one) for one in result.parts]
        self.times = [begin, *ends]
        with tf.control_dependencies(ends):
            parts = [[_after(None, tensor) for tensor in one] for one in result.parts]
        return dataclasses.replace(result, parts=parts)


def _clock(tensors: Sequence[Any]) -> Any:
    """The time at which tensors have been computed, seconds as a float64 scalar."""
    pieces = []
    for tensor in tensors:
        with tf.device(tensor.device or None):  # One number, not the whole, goes to the host.
            pieces.append(tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32)))
    with tf.device("CPU:0"):
        # Not tf.timestamp: a tf.function orders such operations as they were written, so that the
        # end of a replica would be that of the slowest of those before it.
        now: Any = tf.numpy_function(_now, [tf.add_n(pieces)], tf.float64, stateful=False)
    return tf.ensure_shape(now, [])


def _now(_: Any) -> Any:
    return np.float64(time.perf_counter())


def _after(clock: Any, tensor: Any) -> Any:
    """The tensor, not before the clock was read."""
    with tf.control_dependencies([] if clock is None else [clock]), tf.device(tensor.device):
        return tf.identity(tensor)
