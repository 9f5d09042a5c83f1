"""What one device computes for a global batch, with nothing changed by it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import setting
from tfmultigpu.addons.verification.putting_back import Before, Kept
from tfmultigpu.data.batch_format import any_rows
from tfmultigpu.lists import of_type
from tfmultigpu.steps import phases
from tfmultigpu.steps.batches import cut_batch, shards_of
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.draws import sharing_seeds
from tfmultigpu.steps.other_states import Touched, in_order
from tfmultigpu.steps.program import Program
from tfmultigpu.steps.tally import OF_GRADIENT
from tfmultigpu.steps.traced_once import serves_one_device
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.steps.values import Gradient, Shards, Trace
from tfmultigpu.strategies.row_parts import copies_of, units_of
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.types import Array, Function, KerasVariable, Nested, Shard, Tensor

Numbers: TypeAlias = dict[str, Array]  # Of one run, by what they are.
# So near to 1 that a gradient which depends on the scale, as one that a layer clips, is not taken
# for rounding: nearer factors change it less, and change rounding as much as before.
_FACTORS = 1.0, 1.0005, 0.9993


@dataclasses.dataclass(frozen=True, eq=False)
class _Computation:
    """How one device computes a batch.

    Attributes:
        trace: What the step found.
        touched: The state that is changed.
        function: The concrete function of one device, or the function of a replica.
        compute: Returns what there is for a batch.
    """

    trace: Trace
    touched: Touched
    function: Any
    compute: Callable[[Shard], Any]


class OneDevice:
    """The step on one device, of which only numbers are wanted.

    Attributes:
        key: ``step.key()``: with another key it is another step.
        measure: What is compared of ``updated``, variables that an update changes.
        kept: What puts back what the step changes.
        smooth: How many of these are compared with one device; of others, replicas with each other.
        own: The variables of TensorFlow that the code of the user assigns; known once run.
        left_out: Why the update is not compared; "" if it is.
    """

    def __init__(
        self,
        step: Any,
        measure: Callable[[tf.Variable], Any],
        kept: Kept,
        *,
        by_itself: bool = False,
        features: Sequence[Feature] = (),
    ) -> None:
        """Begins without having run.

        Args:
            step: The step.
            measure: What is compared of a variable.
            kept: What puts back what the step changes.
            by_itself: Whether it is traced for one device, also where a trace of the replicas
                would serve.
            features: What the step on one device has beside its own.
        """
        self._by_itself, self.kept = by_itself, kept
        self.key, self.step, self.strategy, self.measure = step.key(), step, step.strategy, measure
        self.twin = step.on_one_device()
        if features:
            self.twin = self.twin.with_features([*self.twin.features, *features])
        self._function: Any = tf.function(self._traced, autograph=False, reduce_retracing=True)
        self.own: list[tf.Variable] = []
        self._begins_at_ones = False
        self._known: Trace | None = None
        # By their graphs: batches of another structure are traced by themselves.
        self._traces: dict[Any, tuple[Trace, Touched]] = {}
        self._last: _Computation | None = None
        self.updated: list[KerasVariable] = []
        self.smooth = 0
        self.left_out = _why_no_update(step)
        if isinstance(step, TrainStep) and not self.left_out:
            # What an optimizer keeps, as a momentum, follows smoothly from the gradient. What it
            # does to a weight may not, as Adam where a gradient is nothing but rounding.
            slots = [each for each in units_of(step.optimizer.variables) if len(each.shape)]
            self.updated = [*slots, *step.variables]
            self.smooth = len(slots) or len(self.updated)

    @property
    def states(self) -> list[KerasVariable]:
        """The states that layers and metrics assign; known once run."""
        return [] if self._last is None else self._last.trace.state

    def named(self, logs: Any) -> dict[str, Tensor]:
        """Returns tensors by name: logs as they are, without their steps, or predictions."""
        if not self.twin.names:
            return numbered("output", dense(logs))
        return {name: value for name, value in logs.items() if name != "steps"}

    def computation(self, batch: Shard, program: Program) -> _Computation:
        """Returns how a batch is computed, traced if it was not and has to be; nothing runs.

        The function of a replica, traced already, serves for the batch in one piece as well. Within
        another function TensorFlow would prepare it twice.
        """
        known = None if self._by_itself else program.trace
        if known is not None:
            factor = phases.loss_factor(self.twin.features)
            if serves_one_device(known, _in_one_piece(batch)._replace(factor=factor)):
                trace = Trace(known=known)
                trace.note_known()
                look = functools.partial(self._look, trace)
                return _Computation(trace, self.step.runner.touched, known.functions[0], look)
        self._known = known
        concrete = self._function.get_concrete_function(tf.nest.map_structure(any_rows, batch))
        return _Computation(*self._traces[concrete.graph], concrete, concrete)

    def run(
        self,
        batch: Shard,
        program: Program,
        move: Function | None = None,
        *,
        updates: bool = True,
    ) -> Numbers:
        """Returns arrays by name.

        Args:
            batch: The batch in one piece.
            program: The step; what it assigns is put back.
            move: Returns what a variable begins at in place of its value.
            updates: Whether what the update changes is among the arrays.
        """
        computation = self._last = self.computation(batch, program)
        with self.kept.putting_back(computation.function, program.run) as before:
            if move is not None:
                for number, each in enumerate(before):
                    each.contents.assign(move(number, each.handle, each.value))
            self.begin(before, program)
            logs, state, *gradients = computation.compute(batch)
            self.own = self._own_variables(computation)
            numbers: dict[str, Any] = self.named(logs) | numbered("state", state)
            numbers |= numbered("own", map(tf.identity, self.own))
            if self.updated and updates:
                self._update(computation.trace, gradients[0], state)
                for i, variable in enumerate(self.updated):
                    first = copies_of(self.strategy, variable)[0]
                    numbers[f"update {i}"] = self.measure(first)
            arrays = {name: np.asarray(number) for name, number in numbers.items()}
            return arrays | contents_of_tables(self.step)

    def has_zeros(self) -> bool:
        """Returns whether a state that replicas assign begins at zero; known once run."""
        return any(bool(tf.reduce_all(each == 0)) for each in self._states_alike())

    def beginning_at_ones(self) -> AbstractContextManager[None]:
        """Has states that are zero begin at one, here and where ``begin`` is called."""
        return setting(self, _begins_at_ones=True)

    def begin(self, before: Sequence[Before], program: Program) -> None:
        """Assigns what states of ``program`` begin at, given what they are put back to."""
        # Each replica keeps statistics of its own rows; one device has the first replica's.
        for layer in program.trace.own_moments:
            for variable in layer.non_trainable_variables:
                first, *others = copies_of(self.strategy, variable)
                for copy in others:
                    copy.assign(first)
        assert self._last is not None
        # What logical replicas add to begins at zero on one device.
        summed = self._handles(self._last.trace.begin_at_zero)
        alike: set[int] = set()
        if self._begins_at_ones:
            alike.update(id(state.handle) for state in self._states_alike())
        for each in before:
            if id(each.handle) in summed:
                each.contents.assign(tf.zeros_like(each.value))
            elif id(each.handle) in alike and bool(tf.reduce_all(each.value == 0)):
                each.contents.assign(tf.ones_like(each.value))

    def _states_alike(self) -> list[tf.Variable]:
        """Returns each copy of each state of numbers that has one value, the same on all replicas.

        A single number that is only read, as a factor that a callback raises, is one as well. Of a
        variable that is combined when it is read, the copies of one begin would be N. What Keras
        does with the statistics of a normalization is known, and nothing is hidden by zeros.
        """
        known: set[int] = set()
        for layer in of_type(all_layers(self.step.model), keras.layers.BatchNormalization):
            known.update(map(id, (layer.moving_mean, layer.moving_variance)))
        states: list[Any] = []
        for state in self.states:
            if not state.trainable and id(state) not in known:
                states.append(state)
        assert self._last is not None
        others = self._handles([*self.step.model.trainable_variables, *self.states])
        numbers = [v for v in self._last.function.variables if v.shape.rank == 0]
        read = [v for v in numbers if v.dtype.is_floating and id(v.handle) not in others]
        for variable in [*self.own, *read]:
            states.append(_compat.variable_of_handle(variable.handle) or variable)
        alike: list[tf.Variable] = []
        for state in states:
            when = getattr(state.synchronization, "name", state.synchronization)
            if when.lower() != "on_read" and tf.as_dtype(state.dtype) != tf.bool:
                alike += copies_of(self.strategy, state)
        return alike

    def _handles(self, variables: Iterable[KerasVariable]) -> set[int]:
        """Returns the ``id`` of the resource of each copy of variables."""
        found: set[int] = set()
        for variable in variables:
            found.update(id(copy.handle) for copy in copies_of(self.strategy, variable))
        return found

    def _own_variables(self, computation: _Computation) -> list[tf.Variable]:
        """Returns what one device assigns at once: variables that Keras does not know.

        The replicas assign the same ones, or copies of them, of which the first is compared.
        """
        assigned = set(map(id, computation.touched.assigned))
        model = self.step.model
        known = [*model.variables, *self.states, *self.updated]
        # Predictions assign those of a metric in a layer at once, and Keras adds them.
        for metric in (*self.step.metrics, *keras.layers.Layer.metrics.fget(model)):
            known += metric.variables
        assigned -= self._handles(known)
        return [each for each in computation.function.variables if id(each.handle) in assigned]

    def moved(
        self, batch: Shard, program: Program, rounding: float, *, scales: bool, updates: bool
    ) -> list[Numbers]:
        """Returns the arrays twice as they are, then rounded otherwise.

        That is from weights moved by one rounding, and with the loss at other ``scales``, for
        which the step is traced once more.
        """
        run = functools.partial(self.run, batch, program, updates=updates)
        states = self._handles(self.states)

        def move(seed: int, number: int, handle: Tensor, value: Tensor) -> Tensor:
            if id(handle) in states or not value.dtype.is_floating:
                return value
            noise = tf.random.stateless_uniform(value.shape, (seed, number), -1.0, 1.0)
            return value * (1 + tf.cast(rounding * noise, value.dtype))

        moves = None, None, functools.partial(move, 1), functools.partial(move, 2)
        arrays = [run(each) for each in moves]
        if scales and isinstance(self.step, TrainStep):
            arrays += self._scaled(batch, program, arrays[0], updates=updates)
        return arrays

    def _scaled(
        self, batch: Shard, program: Program, still: Numbers, *, updates: bool
    ) -> list[Numbers]:
        """Returns the arrays with what the scale of the loss changes in the gradient."""
        scale = _OtherScale()
        # It is traced by itself, and of code that counts its traces another trace is another step.
        scaled = OneDevice(self.step, self.measure, self.kept, by_itself=True, features=[scale])
        run = functools.partial(scaled.run, batch, program, updates=updates)
        base, *others = [run() for _ in scale.scales()]
        names = [each for each in still if each in OF_GRADIENT or each.startswith("update ")]
        arrays = []
        for other in others:
            changed = {name: still[name] + (other[name] - base[name]) for name in names}
            arrays.append(still | changed)
        return arrays

    def _traced(self, batch: Shard) -> tuple[Tensor, ...]:
        trace, touched = Trace(known=self._known), Touched()
        self._traces[tf.compat.v1.get_default_graph()] = trace, touched
        with touched.noting():
            return self._look(trace, batch)

    def _look(self, trace: Trace, batch: Shard) -> tuple[Tensor, ...]:
        with sharing_seeds(self.strategy):
            looked = self.twin.look(_in_one_piece(batch), trace)
        if not self.twin.names:
            return looked, ()
        tally, (first, *_), *gradients = looked
        return tally.logs(), first.state, *[each._replace(variables=()) for each in gradients]

    def _update(self, trace: Trace, gradient: Gradient, state: Sequence[Tensor]) -> None:
        """Updates the first copy of each variable; not in a trace, which would take longer."""
        for variable, value in zip(self.states, state, strict=True):
            if variable.trainable:  # As SpectralNormalization assigns the weight of a layer.
                variable.assign(value)
        gradient = gradient._replace(variables=trace.updated)

        with self.step.update.on_first():
            phases.update(self.step.update, gradient)
        phases.advance(self.step.features, gradient, [])


class _OtherScale(Feature):
    """Multiplies the loss, and the step divides the gradient: it is as it was, rounded otherwise.

    Where many equal numbers are added, as of an average over an image, each addition rounds in the
    same direction. Weights that are moved by one rounding change little of that, another scale
    does.
    """

    def __init__(self) -> None:
        self._factor = tf.Variable(tf.ones([]), trainable=False)

    def scales(self) -> Iterator[float]:
        """Sets one factor after the other, and yields it."""
        for factor in _FACTORS:
            self._factor.assign(factor)
            yield factor

    def loss_factor(self) -> tf.Tensor:
        """Returns the factor."""
        return tf.convert_to_tensor(self._factor)


def _in_one_piece(batch: Shard) -> Shards:
    strategy = tf.distribute.get_strategy()
    return shards_of(strategy, *cut_batch(strategy, batch))


def _why_no_update(step: Any) -> str:
    """Returns why updates are not compared; "" if one device knows what features do to them."""
    if not isinstance(step, TrainStep):
        return ""
    for feature in step.features:
        changes = type(feature).on_gradient is not Feature.on_gradient
        if changes and feature.on_one_device() is None:
            return (
                f"The update was not compared: {type(feature).__name__} changes the gradient, and "
                "on one device nothing does. Write in it: def on_one_device(self): return self, "
                "or what takes its place there."
            )
    return ""


def numbered(name: str, values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns values by a name with their number."""
    return {f"{name} {number}": value for number, value in enumerate(values)}


def contents_of_tables(step: Any) -> Numbers:
    """Returns the keys and the values of the tables that a step writes to, by name."""
    contents = {}
    for number, table in enumerate(step.runner.touched.tables):
        keys, values = in_order(*table.read())
        contents[f"table {number} key"] = keys
        contents[f"table {number} value"] = values
    return contents


def dense(outputs: Nested) -> list[Tensor]:
    """Returns the dense floating-point tensors in a nested structure."""
    leaves = tf.nest.flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
