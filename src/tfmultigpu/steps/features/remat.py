"""Rematerialization: what ``keras.remat`` computes again is what the forward pass computed.

To save memory, the backward pass calls a rematerialized function once more. By itself that call
would draw other numbers, read what the first call has assigned, and assign again. Here it repeats
the first call::

    forward     results, losses = function(inputs); notes the seeds, and the values of variables
    backward    the same call with these seeds and values, after the gradients of its results;
                assigns nothing; gives a gradient to each input, variable and added loss

What cannot be repeated is an error: see ``repeatable``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.lists import present
from tfmultigpu.steps.assignments import DeferredAssignments, deferred_here
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.features.repeatable import (
    Value,
    check_captures,
    check_effects,
    not_the_same,
    noting_operations,
)
from tfmultigpu.steps.values import Rows
from tfmultigpu.types import Function


class Recompute(Feature):
    """Has what is computed again in the backward pass repeat the forward pass."""

    def bind(self, step: BoundStep) -> None:
        """Keeps the step, which knows what it trains."""
        self._step = step

    def on_one_device(self) -> Feature:
        """Returns the same: one device computes again as well."""
        return Recompute()

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Has rematerialized functions that this replica calls repeat themselves."""

        def call(function: Function, args: Value, kwargs: Value) -> Value:
            scope = deferred_here()
            if scope is None:  # TensorFlow fails to compute again in the body of a loop.
                return function(*args, **kwargs)
            trained = [variable.value for variable in self._step.variables]
            return _Call(function, scope, trained).on(args, kwargs)

        with _calling_by(call):
            yield


class CallOnce(Feature):
    """Has rematerialized functions called as they are, in a step without a backward pass."""

    def on_one_device(self) -> Feature:
        """Returns the same."""
        return self

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Has rematerialized functions called as they are."""
        with calling_once():
            yield


@contextmanager
def calling_once() -> Iterator[None]:
    """Has rematerialized functions called as they are: in a graph they refuse named arguments."""
    with _calling_by(lambda function, args, kwargs: function(*args, **kwargs)):
        yield


@contextmanager
def _calling_by(call: Callable[[Function, Value, Value], Value]) -> Iterator[None]:
    """Has rematerialized functions go through ``call``; other custom gradients stay."""

    def differentiate(original: Function, function: Function, args: Value, kwargs: Value) -> Value:
        inner = _compat.rematerialized(function)
        if inner is None:
            return original(function, args, kwargs)
        return call(inner, args, kwargs)

    with patching(*_compat.custom_gradients(), differentiate):
        yield


def _same(tensor: tf.Tensor) -> tf.Tensor:
    return tensor


class _Call:
    """One call of a rematerialized function, which the backward pass repeats."""

    def __init__(
        self, function: Function, scope: DeferredAssignments, trained: Sequence[Value]
    ) -> None:
        self._function, self._scope, self._trained = function, scope, trained
        self._seeds = _Seeds(function)
        self._layer_call = _compat.layer_call()

    def on(self, args: Value, kwargs: Value) -> Value:
        """Returns what the function returns, and adds to layers the losses that it adds."""
        arguments = _Structure((args, kwargs))
        results, layers = arguments, list[Value]()

        # TensorFlow takes the gradient of this function, not those of the operations in it.
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def forward(*inputs: tf.Tensor) -> Value:
            nonlocal results, layers
            with (
                noting_operations() as operations,
                self._scope.noting_reads() as self._values,
                self._seeds.noting(),
            ):
                results, layers, losses = self._run(arguments.filled(inputs))
            outputs = [*results.tensors, *losses]

            def backward(*upstream: Value, variables: Sequence[Value] = ()) -> Value:
                effects = [one for one in operations if one not in self._scope.early]
                check_effects(self._function, effects)
                of_inputs, of_variables = self._again(arguments, outputs, upstream, variables)
                return (of_inputs, of_variables) if variables else of_inputs

            return outputs or [tf.zeros([])], backward  # There has to be one.

        outputs = forward(*arguments.tensors)
        count = len(results.tensors)
        for layer, loss in zip(layers, outputs[count:], strict=False):
            layer.add_loss(loss)
        return results.filled(outputs[:count])

    def _again(
        self,
        arguments: _Structure,
        outputs: Sequence[tf.Tensor],
        upstream: Sequence[Value],
        variables: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """Repeats the call; returns the gradients of its inputs and of variables."""
        asked = list(map(tf.convert_to_tensor, present(upstream)))
        delay = _Delay(asked)
        with tf.GradientTape() as tape:
            inputs = list(map(delay, arguments.tensors))
            tape.watch(inputs)
            with (
                noting_operations() as operations,
                _compat.inside_layer_call(self._layer_call),
                self._scope.repeating(self._values),
                self._seeds.repeating(delay),
            ):
                results, _, losses = self._run(arguments.filled(inputs, delay))
            repeated = [*results.tensors, *losses]
        if [one.dtype for one in repeated] != [one.dtype for one in outputs]:
            raise not_the_same(self._function, "it returns or adds to the loss something else")
        check_captures(self._function, operations, inputs, self._trained)
        pairs = zip(repeated, upstream, strict=False)
        targets = [result for result, gradient in pairs if gradient is not None]
        sources = [*inputs, *variables]
        gradients = tape.gradient(targets, sources, output_gradients=asked)
        return gradients[: len(inputs)], gradients[len(inputs) :]

    def _run(self, arguments: Value) -> tuple[_Structure, list[Value], list[tf.Tensor]]:
        """Calls the function; returns its results, and layers with the losses that they add."""
        layers: list[Value] = []
        losses: list[tf.Tensor] = []

        def add_loss(_: Function, layer: Value, added: Value) -> None:
            for loss in tf.nest.flatten(added):
                layers.append(layer)
                losses.append(tf.convert_to_tensor(loss))

        args, kwargs = arguments
        with patching(keras.layers.Layer, "add_loss", add_loss):
            results = self._function(*args, **kwargs)
        return _Structure(results), layers, losses


class _Seeds:
    """The seeds of the draws of one call, in order, each with the generator that gave it."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._drawn: list[tuple[Value, tf.Tensor]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes the seeds that are drawn."""

        def draw(original: Function, generator: Value, *args: Value, **kwargs: Value) -> Value:
            seed = original(generator, *args, **kwargs)
            self._drawn.append((generator, seed))
            return seed

        with patching(keras.random.SeedGenerator, "next", draw):
            yield

    @contextmanager
    def repeating(self, delay: _Delay) -> Iterator[None]:
        """Has the same draws take the same seeds."""
        left = list(self._drawn)

        def draw(_: Function, generator: Value, *args: Value, **kwargs: Value) -> Value:
            if not left or left[0][0] is not generator:
                raise not_the_same(self._function, "it draws more often or in another order")
            return delay(left.pop(0)[1])

        with patching(keras.random.SeedGenerator, "next", draw):
            yield
        if left:
            raise not_the_same(self._function, "it draws less often")


class _Structure:
    """A nested structure, and the tensors in it that can have a gradient.

    Attributes:
        tensors: These tensors, in order.
    """

    def __init__(self, structure: Value) -> None:
        self._structure = tf.nest.map_structure(_value, structure)
        self._leaves = tf.nest.flatten(self._structure, expand_composites=True)
        self.tensors = list(filter(_has_gradient, self._leaves))

    def filled(self, tensors: Sequence[tf.Tensor], change: Function = _same) -> Value:
        """Returns the structure with other tensors in place of these, under the same masks.

        Tensors without a gradient, and masks, go through ``change``.
        """
        turn = iter(tensors)
        leaves = []
        for leaf in self._leaves:
            if not isinstance(leaf, tf.Tensor):
                leaves.append(leaf)
                continue
            new = next(turn) if _has_gradient(leaf) else change(leaf)
            mask = _compat.keras_mask(leaf)
            if mask is not None:
                _compat.set_keras_mask(new, change(mask))
            leaves.append(new)
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


class _Delay:
    """Delays tensors until others are computed, so that nothing is computed again too early.

    It also keeps TensorFlow from taking what is computed again for the same as the first time.
    """

    def __init__(self, others: Sequence[tf.Tensor]) -> None:
        self._others = list(others)
        first = tf.reduce_max(tf.reshape(others[0], [-1])[:1]) if others else tf.zeros([])
        # XLA heeds data alone. This is zero whatever the number, but no compiler knows it.
        number = tf.where(first == first, tf.abs(first), tf.zeros_like(first))
        self._zero = tf.minimum(number, tf.zeros_like(number))

    def __call__(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor that is there after the others."""
        with tf.control_dependencies(self._others):
            later: tf.Tensor = tf.identity(tensor)
        if not _has_gradient(tensor):
            return later
        return later + tf.cast(self._zero, tensor.dtype)


def _has_gradient(leaf: Value) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _value(leaf: Value) -> Value:
    """Returns the value of a variable of TensorFlow, whose gradient is asked for as an input."""
    if isinstance(leaf, tf.Variable):
        return tf.convert_to_tensor(leaf)
    return leaf
