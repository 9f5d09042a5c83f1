"""What one device computes for a global batch, with nothing changed by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.data.batch_format import any_rows
from tfmultigpu.steps import step as train_step
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.seeds import sharing_seeds
from tfmultigpu.steps.tally import Layout

_LARGEST = 2**22  # Elements of a variable whose update is compared.


class DryRun:
    """A traced function of batches that leaves all variables as they were.

    Only what its results need is run: no print or count of the user beside them. Variables that
    this changes all the same, such as the state of a generator, are put back.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Takes ``f(*batches)``, which returns a nested structure of tensors."""
        self._function = tf.function(function, autograph=False, reduce_retracing=True)
        self._pruned: dict[Any, tuple[Any, Any]] = {}  # Keeps the traced function, for its id.

    def __call__(self, *batches: Any, move: Callable[..., Any] | None = None) -> Any:
        """Runs it with ``move(number, handle, value)`` as the value of each variable, if given."""
        specs = tf.nest.map_structure(any_rows, batches)
        concrete = self._function.get_concrete_function(*specs)
        if id(concrete) not in self._pruned:
            # It takes a third of the time of the trace, and mostly there is nothing to leave out.
            has_effects = any(map(_is_effect, concrete.graph.get_operations()))
            self._pruned[id(concrete)] = concrete, _compat.pruned(concrete) if has_effects else None
        pruned = self._pruned[id(concrete)][1]
        before = _compat.variables_of(concrete if pruned is None else pruned)
        leaves = tf.nest.flatten(batches, expand_composites=True)
        try:
            for number, (handle, value) in enumerate(before):
                if move is not None:
                    _assign(handle, move(number, handle, value))
            if pruned is None:
                results = concrete(*batches)
            else:
                results = pruned(*[leaf for leaf in leaves if leaf is not None])
        finally:
            for handle, value in before:
                _assign(handle, value)
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), results)


class OneDevice:
    """The step on one device, of which only numbers are wanted.

    Attributes:
        twin: The step on one device.
        variables: The variables that have a gradient; known once run, as all that follows.
        chosen: The numbers of those whose update is compared.
        dtype: That of the sums of the loss.
    """

    def __init__(self, step: Any, key: Any, *, all_gradients: bool) -> None:
        """Takes the step, and ``step.key()``: with another key it is another step."""
        self.key, self.twin, self._step = key, step.on_one_device(), step
        self.variables: Sequence[Any] = ()
        self.chosen: list[int] = []
        self.dtype: Any = tf.float32
        self._all_gradients, self._run = all_gradients, DryRun(self._look)
        self._cutter = cutter(self.twin.strategy)
        self._is_narrow = step.message_dtype is not None
        # What a feature does to the gradient may not be known on one device.
        changing = [f for f in step.features if type(f).on_gradient is not Feature.on_gradient]
        self._is_known = (
            all(f.on_one_device() is not None for f in changing) and not self._is_narrow
        )

    @property
    def states(self) -> list[Any]:
        """The Keras variables that the forward pass assigns."""
        return self.twin.trace.state if hasattr(self.twin, "trace") else []

    def __call__(self, batch: Any, move: Any = None) -> dict[str, Any]:
        """Returns arrays by name: terms of the loss, states, gradients, or outputs."""
        arrays: dict[str, Any] = self._run(batch, move=move)
        return arrays | {f"term {i}": value for i, value in enumerate(arrays.get("terms", ()))}

    def moved(self, batch: Any, rounding: float) -> list[dict[str, Any]]:
        """Returns the arrays twice as they are, and twice with weights moved by one rounding."""
        local = self._step.strategy.experimental_local_results
        still = {id(copy.handle) for state in self.states for copy in local(state.value)}

        def move(seed: int, number: int, handle: Any, value: Any) -> Any:
            if id(handle) in still or not value.dtype.is_floating:
                return value
            noise = tf.random.stateless_uniform(value.shape, (seed, number), -1.0, 1.0)
            return value * (1 + tf.cast(rounding * noise, value.dtype))

        moves = [None, None, *[functools.partial(move, seed) for seed in (1, 2)]]
        return [self(batch, each) for each in moves]

    def _look(self, batch: Any) -> dict[str, Any]:
        shards = self._cutter.shards(*self._cutter.cut(batch))
        # A step waits for the effects of the user's code, and so does its check: not to happen.
        effects, checks = ((train_step, "effects_of"), (Layout, "check"))
        with (
            sharing_seeds(self._step.strategy),
            patching(*effects, lambda *_: []),
            patching(*checks, lambda *_: []),
        ):
            looked = self.twin.look(shards)
        if not hasattr(self.twin, "trace"):
            return {f"output {i}": output for i, output in enumerate(dense(looked))}
        tally, passes, *gradients = looked
        self.dtype = passes[0].stats.dtype
        numbers = {"terms": tally.terms}
        numbers |= {f"state {i}": value for i, value in enumerate(passes[0].state)}
        for gradient in gradients:
            numbers |= {} if self._is_narrow else {"norm 0": gradient.norm}
            numbers |= {} if gradient.valid is None else {"valid": gradient.valid}
            if self._is_known:
                numbers |= self._of_gradient(list(gradient.tensors), gradient.variables)
        return numbers

    def _of_gradient(self, tensors: list[Any], variables: Sequence[Any]) -> dict[str, Any]:
        self.variables, optimizer = variables, unwrap_optimizer(self.twin.optimizer)
        assigned = {id(variable) for variable in self.states}
        fit = [
            number
            for number, variable in enumerate(variables)
            if np.prod(variable.shape) <= _LARGEST and id(variable) not in assigned
        ]
        if not _compat.is_own_class_of_keras(optimizer) or hasattr(optimizer, "optimizers"):
            fit = []
        # The first and the last matrix: a bias before a norm has no gradient.
        matrices = [number for number in fit if len(variables[number].shape) > 1] or fit
        self.chosen = sorted({*matrices[:1], *matrices[-1:]})
        every = range(len(variables)) if self._all_gradients else self.chosen
        numbers = {f"gradient {i}": tensors[i] for i in every}
        if self.chosen:
            # To clip once more, as the update does, changes nothing.
            clipped = _compat.clip_as_set(optimizer, tensors)
            updated = [variables[i] for i in self.chosen]
            self._step.update.apply([clipped[i] for i in self.chosen], updated)
            values = [tf.convert_to_tensor(variable.value) for variable in updated]
            numbers |= {f"updated {i}": v for i, v in zip(self.chosen, values, strict=True)}
        return numbers


def cutter(strategy: tf.distribute.Strategy) -> BatchFunction:
    """Returns what makes shards for a strategy."""
    return BatchFunction(lambda shards: shards, strategy)


def dense(outputs: Any) -> list[Any]:
    """Returns the dense floating-point tensors in a nested structure."""
    leaves = tf.nest.flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]


def _is_effect(operation: Any) -> bool:
    """Returns whether it may do something else than to read or assign a variable."""
    reads = any(tensor.dtype == tf.resource for tensor in operation.inputs)
    return operation.op_def.is_stateful and not reads and operation.type != "Assert"


def _assign(handle: Any, value: Any) -> None:
    with tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
