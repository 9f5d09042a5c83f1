"""What one device computes for a global batch, and what rounding may change of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.accumulation.loss_scale import unwrap_optimizer
from tfmultigpu.addons.verification.dry_run import DryRun
from tfmultigpu.steps.batches import BatchFunction
from tfmultigpu.steps.seeds import sharing_seeds

__all__ = ["OneDevice", "dense"]

_LARGEST = 2**22


class OneDevice:
    """The step on one device, of which only numbers are wanted.

    Attributes:
        twin: The step on one device.
        variables: The variables that have a gradient; known once run.
        chosen: The numbers of those whose update is compared.
    """

    def __init__(self, step: Any, key: Any, *, all_gradients: bool) -> None:
        """Takes the step, and ``step.key()``: with another key it is another step."""
        self.key, self.twin = key, step.on_one_device()
        self.variables: Sequence[Any] = ()
        self.chosen: list[int] = []
        self.strategy, self.dtype = step.strategy, tf.float32
        self._step, self._all_gradients = step, all_gradients
        self._whole = BatchFunction(self._look, self.twin.strategy)
        self._run = DryRun(self._look)

    @property
    def states(self) -> list[Any]:
        """The Keras variables that the step assigns in its forward pass; known once run."""
        return self.twin.trace.state if hasattr(self.twin, "trace") else []

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Returns numbers by name: of the terms of the loss, states, gradients, or outputs."""
        return _arrays(self._run(batch))

    def moved(self, batch: Any, rounding: float) -> list[dict[str, Any]]:
        """Returns the numbers as they are, once more, and twice with weights that were moved.

        Args:
            batch: The batch.
            rounding: The largest relative change of a weight.
        """
        import keras

        assigned = {id(variable) for variable in self.states}
        weights = [v for v in self._step.model.trainable_variables if id(v) not in assigned]
        copies = {id(v): tf.Variable(tf.convert_to_tensor(v.value)) for v in weights}

        def read(original: Any, variable: Any) -> Any:
            value, copy = original(variable), copies.get(id(variable))
            if copy is None or isinstance(value, tf.Variable):
                return value if copy is None else copy
            return tf.cast(copy, value.dtype)

        def look(batch: Any) -> Any:
            with patching(keras.Variable, "value", read):
                return self._look(batch)

        run, found = DryRun(look), []
        for seed in (0, 0, 1, 2):
            for number, variable in enumerate(weights if seed else ()):
                value = tf.convert_to_tensor(variable.value)
                noise = tf.random.stateless_uniform(value.shape, [seed, number], -1.0, 1.0)
                copies[id(variable)].assign(value * (1 + tf.cast(rounding * noise, value.dtype)))
            found.append(_arrays(run(batch)))
        return found

    def updated(self, numbers: dict[str, Any]) -> list[Any]:
        """Returns the chosen variables after a step of the stock optimizer on copies of them.

        Nothing if the optimizer cannot be made again, as those of users. Call it before the step.
        """
        pairs = [(self.variables[i], numbers[f"clipped {i}"]) for i in self.chosen]
        if not pairs:
            return []
        if not numbers.get("valid", True):
            return [variable.numpy() for variable, _ in pairs]
        return stock_update(unwrap_optimizer(self._step.optimizer), pairs)

    def _look(self, batch: Any) -> dict[str, Any]:
        shards = self._whole.shards(*self._whole.cut(batch))
        with sharing_seeds(self._step.strategy):
            looked = self.twin.look(shards)
        if not hasattr(self.twin, "trace"):
            return {f"output {i}": output for i, output in enumerate(dense(looked))}
        tally, passes, *gradients = looked
        self.dtype = passes[0].stats.dtype
        numbers = {"terms": tally.terms}
        numbers |= {f"state {i}": value for i, value in enumerate(passes[0].state)}
        for gradient in gradients:
            self.variables, self.chosen = gradient.variables, self._choose(gradient.variables)
            optimizer = unwrap_optimizer(self._step.optimizer)
            clipped: Any = gradient.tensors
            if self.chosen:
                clipped = _compat.clip_as_set(optimizer, list(clipped))
            numbers |= {f"clipped {i}": clipped[i] for i in self.chosen}
            every = range(len(self.variables)) if self._all_gradients else self.chosen
            numbers |= {f"gradient {i}": gradient.tensors[i] for i in every}
            numbers["norm 0"] = gradient.norm
            if gradient.valid is not None:
                numbers["valid"] = gradient.valid
        return numbers

    def _choose(self, variables: Sequence[Any]) -> list[int]:
        """Chooses the first and the last weight matrix: what is before a norm has no gradient."""
        optimizer = unwrap_optimizer(self._step.optimizer)
        assigned = {id(variable) for variable in self.states}
        fit = [
            number
            for number, variable in enumerate(variables)
            if np.prod(variable.shape) <= _LARGEST and id(variable) not in assigned
        ]
        if not _compat.is_own_class_of_keras(optimizer) or hasattr(optimizer, "optimizers"):
            return []
        matrices = [i for i in fit if len(variables[i].shape) > 1] or fit
        return sorted({*matrices[:1], *matrices[-1:]})


def stock_update(optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns variables after one step of a Keras optimizer on copies of them.

    Args:
        optimizer: The optimizer; it stays as it is.
        pairs: Keras variables, each with its gradient, which is clipped.

    Returns:
        Their new values; nothing if the optimizer cannot be made again with all that it has.
    """
    import keras

    config = {**optimizer.get_config(), "loss_scale_factor": None}
    config |= dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"))
    schedule = vars(optimizer).get("_learning_rate")
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = schedule
    again = type(optimizer).from_config(config)
    copies = []
    for variable, _ in pairs:
        *scopes, name = variable.path.split("/")
        with ExitStack() as contexts:
            for scope in scopes:
                contexts.enter_context(keras.name_scope(scope))
            copy = keras.Variable(variable.numpy(), dtype=variable.dtype, name=name)
        copy.constraint = getattr(variable, "constraint", None)
        copies.append(copy)
    again.build(copies)
    if _settings(again) != _settings(optimizer):
        return []
    values = {variable.path: variable for variable in optimizer.variables}
    known = len(values) == len(optimizer.variables)  # Adafactor has several of one path.
    if not known or any(variable.path not in values for variable in again.variables):
        return []
    for variable in again.variables:
        variable.assign(values[variable.path].numpy())
    again.apply([tf.convert_to_tensor(gradient) for _, gradient in pairs], copies)
    return [copy.numpy() for copy in copies]


def _settings(optimizer: Any) -> dict[str, Any]:
    plain = (bool, int, float, str, set, re.Pattern, type(None))
    changed = {"clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor"}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, plain) and name not in changed and not name.startswith("_self_")
    }


def _arrays(numbers: dict[str, Any]) -> dict[str, Any]:
    arrays = {key: tensor.numpy() for key, tensor in numbers.items()}
    terms = arrays.get("terms", ())
    half = len(terms) // 2
    for number in range(half):
        arrays |= {f"sum {number}": terms[number], f"weight {number}": terms[half + number]}
    return arrays


def dense(outputs: Any) -> list[Any]:
    """Returns the dense floating-point tensors in a nested structure."""
    leaves = tf.nest.flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
