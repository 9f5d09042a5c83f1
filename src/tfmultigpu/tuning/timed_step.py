"""Train step that reads the clock between its parts.

Operations inside the step's ``tf.function`` read the clock. Each waits for the part before it, and
the next part waits for it. So the parts cannot overlap, and the results stay the same. A GPU
computes asynchronously, so an operation fetches one number of each result to the host before it
reads the clock.
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

__all__ = ["TimedStep", "Times"]

_TIMES = "times"


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


class TimedStep(TrainStep):
    """Copy of a train step, with the same variables, that measures its parts."""

    def __init__(self, step: TrainStep) -> None:
        """Copies a train step, which remains usable."""
        vars(self).update(vars(step))
        self._functions = {}
        self._phase: Any = _TimedPhase(self._phase, self.strategy)
        whole, update = self.compute, self._update
        vars(self).update(
            compute=functools.partial(self._with_times, whole),
            _update=functools.partial(self._between_clocks, update),
        )
        self._ends: list[Any] = []
        self._use(self._what_is_frozen())

    def run_timed(self, batch: Any) -> tuple[dict[str, Any], Times]:
        """Trains on one batch; returns the logs and the times of the parts."""
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


class _TimedPhase:
    """Replica phase that keeps its begin and the end of each replica."""

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
        ends = [_clock([part for part in one if part is not None]) for one in result.parts]
        self.times = [begin, *ends]
        with tf.control_dependencies(ends):
            parts = [
                [None if tensor is None else _after(None, tensor) for tensor in one]
                for one in result.parts
            ]
        return dataclasses.replace(result, parts=parts)


def _clock(tensors: Sequence[Any]) -> Any:
    """Returns the time at which tensors have been computed, in seconds, as a float64 scalar."""
    pieces = []
    for tensor in tensors:
        with tf.device(tensor.device or None):  # Sends one number to the host, not the tensor.
            pieces.append(tf.reduce_sum(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32)))
    with tf.device("CPU:0"):
        # Not tf.timestamp: a tf.function runs such operations in program order, so a replica's end
        # would wait for the replicas before it.
        now: Any = tf.numpy_function(_now, [tf.add_n(pieces)], tf.float64, stateful=False)
    return tf.ensure_shape(now, [])


def _now(_: Any) -> Any:
    return np.float64(time.perf_counter())


def _after(clock: Any, tensor: Any) -> Any:
    """Returns the tensor, available once the clock was read."""
    with tf.control_dependencies([] if clock is None else [clock]), tf.device(tensor.device):
        return tf.identity(tensor)
