"""What one device computes for a global batch, with nothing changed by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from tfmultigpu._patch import patching
from tfmultigpu.addons.verification.putting_back import putting_back
from tfmultigpu.data.batch_format import any_rows
from tfmultigpu.steps import phases
from tfmultigpu.steps.batches import cut_batch, shards_of
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.draws import sharing_seeds
from tfmultigpu.steps.other_states import Touched, in_order
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.steps.values import Trace
from tfmultigpu.strategies.row_parts import copies_of, units_of
from tfmultigpu.types import KerasVariable, Shard


class OneDevice:
    """The step on one device, of which only numbers are wanted.

    Attributes:
        key: ``step.key()``: with another key it is another step.
        measure: What is compared of ``updated``, variables that an update changes.
        smooth: How many of these are compared with one device; of others, replicas with each other.
        own: The variables of TensorFlow that the code of the user assigns; known once run.
    """

    def __init__(
        self, step: Any, measure: Callable[[Any], Any], *, by_itself: bool = False
    ) -> None:
        """Begins without having run.

        Args:
            step: The step.
            measure: What is compared of a variable.
            by_itself: Whether it is traced for one device, also where a trace of the replicas
                would serve.
        """
        self._by_itself = by_itself
        self.key, self.step, self.strategy, self.measure = step.key(), step, step.strategy, measure
        self.twin, self.trace = step.on_one_device(), Trace()
        self._function: Any = tf.function(self._look, autograph=False, reduce_retracing=True)
        # What a feature does to the gradient may not be known on one device.
        changing = [f for f in step.features if type(f).on_gradient is not Feature.on_gradient]
        trains = None not in [f.on_one_device() for f in changing] and isinstance(step, TrainStep)
        # What an optimizer keeps, as a momentum, follows smoothly from the gradient. What it does
        # to a weight may not, as Adam where a gradient is nothing but rounding.
        kept = [v for v in units_of(step.optimizer.variables) if len(v.shape)] if trains else []
        self.updated = [*kept, *step.variables] if trains else []
        self.own: list[tf.Variable] = []
        self._touched = Touched()  # By the last trace.
        self.smooth = len(kept) or len(self.updated)

    @property
    def states(self) -> list[Any]:
        """The states that layers and metrics assign; known once run."""
        return self.trace.state

    def named(self, logs: Any) -> dict[str, Any]:
        """Returns tensors by name: logs as they are, without their steps, or predictions."""
        if self.twin.names:
            return {name: value for name, value in logs.items() if name != "steps"}
        return {f"output {number}": output for number, output in enumerate(dense(logs))}

    def run(self, batch: Shard, compiled: Any, move: Any = None) -> dict[str, Any]:
        """Returns arrays by name; what ``compiled``, the step, assigns may begin moved."""
        concrete = self._function.get_concrete_function(tf.nest.map_structure(any_rows, batch))
        with putting_back(self.step, concrete, compiled) as before:
            for number, each in enumerate(before if move else ()):
                each.assign(move(number, each.handle, each.value))
            logs, state, *gradients = concrete(batch)
            numbers = self.named(logs) | {f"state {i}": each for i, each in enumerate(state)}
            self.own = self._own_variables()
            numbers |= {f"own {i}": tf.identity(each) for i, each in enumerate(self.own)}
            if self.updated:
                self._update(gradients[0], state)
                firsts = [tf.convert_to_tensor(variable.value) for variable in self.updated]
                numbers |= {f"update {i}": self.measure(each) for i, each in enumerate(firsts)}
            arrays = {name: number.numpy() for name, number in numbers.items()}
            return arrays | contents_of_tables(self.step)

    def _own_variables(self) -> list[tf.Variable]:
        """Returns what one device assigns at once: variables that Keras does not know.

        The replicas assign the same ones, or copies of them, of which the first is compared.
        """
        assigned = {id(handle) for handle in self._touched.assigned}
        model = self.step.model
        known = [*model.variables, *self.states, *self.updated]
        # Predictions assign those of a metric in a layer at once, and Keras adds them.
        for metric in (*self.step.metrics, *keras.layers.Layer.metrics.fget(model)):
            known += metric.variables
        for variable in known:
            assigned -= {id(copy.handle) for copy in copies_of(self.strategy, variable)}
        return [each for each in self._touched.variables if id(each.handle) in assigned]

    def moved(self, batch: Shard, compiled: Any, rounding: float) -> list[dict[str, Any]]:
        """Returns the arrays twice as they are, and twice with weights moved by one rounding."""
        still: set[int] = set()
        for state in self.states:
            still.update(id(copy.handle) for copy in copies_of(self.strategy, state))

        def move(seed: int, number: int, handle: Any, value: Any) -> Any:
            if id(handle) in still or not value.dtype.is_floating:
                return value
            noise = tf.random.stateless_uniform(value.shape, (seed, number), -1.0, 1.0)
            return value * (1 + tf.cast(rounding * noise, value.dtype))

        moves = [None, None, *[functools.partial(move, seed) for seed in (1, 2)]]
        return [self.run(batch, compiled, each) for each in moves]

    def _look(self, batch: Shard) -> tuple[Any, ...]:
        # What replicas call, traced already, serves for the batch in one piece as well.
        self.trace = Trace(known=None if self._by_itself else self.step.runner.trace)
        strategy = self.twin.strategy
        self._touched = Touched()
        with sharing_seeds(self.strategy), self._touched.noting():
            shards = shards_of(strategy, *cut_batch(strategy, batch))
            looked = self.twin.look(shards, self.trace)
        if not self.twin.names:
            return looked, ()
        tally, (first, *_), *gradients = looked
        for gradient in gradients:
            self._variables = gradient.variables
        return tally.logs(), first.state, *[each._replace(variables=()) for each in gradients]

    def _update(self, gradient: Any, state: Sequence[KerasVariable]) -> None:
        """Updates the first copy of each variable; not in a trace, which would take longer."""
        for variable, value in zip(self.states, state, strict=True):
            if variable.trainable:  # As SpectralNormalization assigns the weight of a layer.
                variable.assign(value)
        local = self.strategy.experimental_local_results

        def update(
            original: Any, variable: KerasVariable, function: Any, args: Any = (), **options: Any
        ) -> Any:
            def on_first(one: Any, *args: Any, **kwargs: Any) -> None:
                if one is local(variable)[0]:
                    function(one, *args, **kwargs)

            return original(variable, on_first, args, **options | {"group": False})

        gradient = gradient._replace(variables=self._variables)
        # That of an owner is one update anyway.
        with ExitStack() as contexts:
            if not self.step.update.owned:
                contexts.enter_context(patching(self.strategy.extended, "update", update))
            phases.update(self.step.update, gradient)
        phases.advance(self.step.features, gradient, [])


def contents_of_tables(step: Any) -> dict[str, Any]:
    """Returns the keys and the values of the tables that a step writes to, by name."""
    contents = {}
    for number, table in enumerate(step.runner.touched.tables):
        keys, values = in_order(*table.read())
        contents[f"table {number} key"] = keys
        contents[f"table {number} value"] = values
    return contents


def dense(outputs: Any) -> list[Any]:
    """Returns the dense floating-point tensors in a nested structure."""
    leaves = tf.nest.flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
