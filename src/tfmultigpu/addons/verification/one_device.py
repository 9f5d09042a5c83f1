"""What one device computes for a global batch, with nothing changed by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import any_rows
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.draws import sharing_seeds
from tfmultigpu.steps.features import Feature


class DryRun:
    """A traced function of batches that puts back the variables that it assigns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Takes ``f(*batches)``, which returns a nested structure of tensors."""
        self._function = tf.function(function, autograph=False, reduce_retracing=True)

    def __call__(self, *batches: Any, move: Callable[..., Any] | None = None) -> Any:
        """Runs it with ``move(number, handle, value)`` as the value of each variable, if given."""
        specs = tf.nest.map_structure(any_rows, batches)
        concrete = self._function.get_concrete_function(*specs)
        before = _compat.variables_of(concrete)
        try:
            for number, (handle, value) in enumerate(before if move else ()):
                _assign(handle, move(number, handle, value))  # type: ignore[misc]
            results = concrete(*batches)
        finally:
            for handle, value in before:
                _assign(handle, value)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), results)


class OneDevice:
    """The step on one device, of which only numbers are wanted; ``twin`` is that step."""

    def __init__(self, step: Any, key: Any, *, with_gradients: bool) -> None:
        """Takes the step, and ``step.key()``: with another key it is another step."""
        self.key, self.twin, self.strategy = key, step.on_one_device(), step.strategy
        self.variables: Sequence[Any] = ()  # Those that have a gradient; known once run.
        self.run = DryRun(self._look)  # Arrays by name: terms, states, gradients, or outputs.
        # What a feature does to the gradient may not be known on one device.
        changing = [f for f in step.features if type(f).on_gradient is not Feature.on_gradient]
        is_known = None not in [f.on_one_device() for f in changing]
        with_gradients |= any(not type(f).__module__.startswith("tfmultigpu.") for f in changing)
        self._with_gradients = with_gradients and is_known

    @property
    def trace(self) -> Any:
        """The findings of the last trace; None for a step that predicts."""
        return getattr(self.twin, "trace", None)

    def moved(self, batch: Any, rounding: float) -> list[dict[str, Any]]:
        """Returns the arrays twice as they are, and twice with weights moved by one rounding."""
        local = self.strategy.experimental_local_results
        states = [] if self.trace is None else self.trace.state
        still = {id(copy.handle) for state in states for copy in local(state.value)}

        def move(seed: int, number: int, handle: Any, value: Any) -> Any:
            if id(handle) in still or not value.dtype.is_floating:
                return value
            noise = tf.random.stateless_uniform(value.shape, (seed, number), -1.0, 1.0)
            return value * (1 + tf.cast(rounding * noise, value.dtype))

        moves = [None, None, *[functools.partial(move, seed) for seed in (1, 2)]]
        return [self.run(batch, move=each) for each in moves]

    def _look(self, batch: Any) -> dict[str, Any]:
        cut = cutter(self.twin.strategy)
        with sharing_seeds(self.strategy):
            looked = self.twin.look(cut.shards(*cut.cut(batch)))
        if self.trace is None:
            return _numbered("output", dense(looked))
        tally, passes, *gradients = looked
        terms = tf.unstack(tally.terms, num=2 * len(self.trace.layout.own))
        numbers = _numbered("term", terms) | _numbered("state", passes[0].state)
        for gradient in gradients:
            self.variables = gradient.variables
            numbers |= {"norm 0": gradient.norm}
            numbers |= _numbered("gradient", gradient.tensors) if self._with_gradients else {}
        return numbers


def cutter(strategy: tf.distribute.Strategy) -> BatchFunction:
    """Returns what makes shards for a strategy."""
    return BatchFunction(lambda shards: shards, strategy)


def dense(outputs: Any) -> list[Any]:
    """Returns the dense floating-point tensors in a nested structure."""
    leaves = tf.nest.flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]


def _numbered(name: str, tensors: Sequence[Any]) -> dict[str, Any]:
    return {f"{name} {number}": tensor for number, tensor in enumerate(tensors)}


def _assign(handle: Any, value: Any) -> None:
    with tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
