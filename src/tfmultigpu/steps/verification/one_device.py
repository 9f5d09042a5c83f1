"""The computation of a whole global batch on one device, and its rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.steps.rows import standing_at_all
from tfmultigpu.steps.seeds import sharing_seeds
from tfmultigpu.steps.traces import Traces
from tfmultigpu.steps.verification.trial import Forward, Trial, try_forward

__all__ = ["Computed", "OneDevice"]


@dataclasses.dataclass(frozen=True)
class Computed:
    """The results for one batch.

    Attributes:
        stats: The sums of the terms of the loss, then their weights.
        states: What each variable would have been assigned, by the variable's ``id``.
        gradients: The gradients of the loss, one per trained variable, or None for each without;
            empty if they were not asked for.
        outputs: Predictions, of a forward pass whose outputs are wanted.
    """

    stats: np.ndarray[Any, Any]
    states: dict[int, np.ndarray[Any, Any]]
    gradients: list[Any]
    outputs: list[Any]


class OneDevice:
    """Runs an objective on whole batches, on the default device, and changes nothing.

    Attributes:
        states: The variables that layers assign to, Keras variables; known once run.
        overwritten: Trained variables that layers assign to; likewise.
        terms: The terms of the loss, of which only names and kinds are used; likewise.
    """

    states: Sequence[Any] = ()
    overwritten: Sequence[Any] = ()
    terms: Sequence[Any] = ()

    def __init__(
        self,
        objective: Forward,
        strategy: tf.distribute.Strategy,
        *,
        training: bool,
        gradients: bool,
        jit_compile: bool,
    ) -> None:
        """Takes the objective, the strategy of its model, and how it is run."""
        self._objective = objective
        self._strategy = strategy
        self._training = training
        self._wants_gradients = gradients
        self._jit_compile = jit_compile
        self.forget()

    def forget(self) -> None:
        """Lets go of what was compiled."""
        self._plain = Traces(lambda batches, scale: self._compute(batches[0], scale[0]))
        self._moved = Traces(lambda batches, given: self._compute_moved(batches[0], *given))

    def compute(self, batch: Any, loss_scale: Any = 1.0) -> Computed:
        """Returns what one device computes for a batch.

        Args:
            batch: A nested structure of tensors.
            loss_scale: What the loss is multiplied by before the backward pass.

        Raises:
            CannotVerifyError: Running it would change something.
        """
        return self._run(self._plain, batch, [tf.cast(loss_scale, tf.float32)])

    def compute_with_moved_weights(
        self, batch: Any, rounding: float, loss_scale: Any = 1.0
    ) -> list[Computed]:
        """Returns what one device computes with the weights as they are, then with moved ones.

        Args:
            batch: A nested structure of tensors.
            rounding: The largest relative change of a weight.
            loss_scale: As for ``compute``.
        """
        found = []
        for seed in (0, 1, 2):
            further = [rounding if seed else 0.0, seed, loss_scale]
            given = [tf.cast(one, tf.float32) for one in further]
            found.append(self._run(self._moved, batch, given))
        return found

    def _run(self, traces: Traces, batch: Any, given: list[Any]) -> Computed:
        found = traces(batch, [tf.nest.flatten(batch)], given)
        arrays = tf.nest.map_structure(lambda one: None if one is None else one.numpy(), found)
        keys = [id(one) for one in self.states]
        states = dict(zip(keys, arrays["states"], strict=True))
        return Computed(arrays["stats"], states, arrays["gradients"], arrays["outputs"])

    def _compute(
        self, batch: Any, loss_scale: Any, weights: Sequence[tuple[Any, Any]] = ()
    ) -> dict[str, Any]:
        if not self._jit_compile:
            return self._trace(batch, loss_scale, weights)
        # XLA draws other random numbers, so what is compiled is held to what is compiled.
        variables = [variable for variable, _ in weights]

        def trace(batch: Any, loss_scale: Any, values: list[Any]) -> dict[str, Any]:
            return self._trace(batch, loss_scale, list(zip(variables, values, strict=True)))

        # Keras variables are no arguments of a tf.function.
        compiled = tf.function(trace, jit_compile=True, autograph=False)
        return dict(compiled(batch, loss_scale, [value for _, value in weights]))

    def _trace(
        self, batch: Any, loss_scale: Any, weights: Sequence[tuple[Any, Any]]
    ) -> dict[str, Any]:
        variables = self._objective.trained
        values = [one.value for one in variables]
        with tf.GradientTape(watch_accessed_variables=self._wants_gradients) as tape:
            with sharing_seeds(self._strategy), standing_at_all(batch):
                trial = try_forward(self._objective, batch, self._training, weights=weights)
            if self._wants_gradients:
                loss = _loss(trial)
                target = loss * tf.cast(loss_scale, loss.dtype)
        self.states, self.terms = trial.states, trial.terms
        self.overwritten = trial.overwritten
        gradients: list[Any] = []
        if self._wants_gradients:
            scale = tf.cast(loss_scale, tf.float64)
            _, penalties = self._objective.regularization(variables)
            for part, penalty in zip(tape.gradient(target, values), penalties, strict=True):
                gradient = None if part is None else _wide(part) / scale
                if penalty is not None:
                    gradient = _wide(penalty) + (0.0 if gradient is None else gradient)
                gradients.append(gradient)
        return {
            "stats": trial.stats,
            "states": trial.values,
            "gradients": gradients,
            "outputs": trial.outputs,
        }

    def _compute_moved(self, batch: Any, by: Any, seed: Any, loss_scale: Any) -> dict[str, Any]:
        weights = []
        for i, variable in enumerate(self._objective.trained):
            value = tf.convert_to_tensor(variable.value)
            noise = tf.random.stateless_uniform(
                tf.shape(value), tf.stack([tf.cast(seed, tf.int32), i]), -1.0, 1.0, tf.float32
            )
            weights.append((variable, value * (1 + tf.cast(by * noise, value.dtype))))
        return self._compute(batch, loss_scale, weights)


def _loss(trial: Trial) -> Any:
    """The loss of the batch without weight regularization, in the dtype of its terms."""
    total: Any = 0.0
    for term in trial.terms:
        if term.logged:
            continue
        weight = tf.ones([], term.sum.dtype) if term.fixed else tf.cast(term.weight, term.sum.dtype)
        total += term.factor * tf.cast(tf.math.divide_no_nan(term.sum, weight), tf.float64)
    return total


def _wide(gradient: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(gradient), tf.float64)
