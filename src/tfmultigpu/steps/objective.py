"""The loss of a model on one shard, as terms that can be added over shards."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.accumulation.loss_sum import (
    FixedLossSum,
    LossSum,
    LossTerm,
    as_loss,
    is_fixed,
    loss_term,
)
from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.steps.build_model import as_model
from tfmultigpu.steps.outputs import Output, match_outputs
from tfmultigpu.steps.recording import noting_losses_read, recording_added_losses
from tfmultigpu.steps.tally import Layout
from tfmultigpu.strategies.scopes import all_layers


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss with what belongs to it, for models of several outputs: an argument ``loss`` of steps.

    Attributes:
        loss: A Keras loss, its name, a function ``f(y_true, y_pred)`` of per-example values, or a
            dict or list of them, one per output (None for none).
        loss_weights: A number, or a dict or list of numbers, one per output.
        weighted_metrics: Keras metrics that are updated with sample weights; for several outputs a
            dict or list by output.

    Example:
        >>> import tfmultigpu as tmg
        >>> loss = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
        >>> objective = tmg.steps.Objective(loss, loss_weights={"kind": 1.0, "size": 0.5})
        >>> objective.loss_weights["size"]
        0.5
    """

    loss: Any
    loss_weights: Any = None
    weighted_metrics: Any = ()


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward pass of a step: from a shard to additive terms, and outputs for metrics.

    Attributes:
        model: The Keras model.
        objective: The losses, as Keras losses, with their weights; of None with ``forward``.
        forward: ``f(model, batch, training)``, or None.
        user_model: The first argument of ``forward``: the model or models, as they were given.
        chosen: The variables to train; None for those of the model.
    """

    model: Any
    objective: Objective
    forward: Callable[[Any, Any, bool], Any] | None = None
    user_model: Any = None
    chosen: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, model: Any, loss: Any, forward: Any = None, variables: Any = None) -> Forward:
        """Creates a forward pass from the arguments of a step."""
        if forward is not None and not callable(forward):
            raise TypeError(
                "forward must be a function f(model, batch, training). Received: "
                f"forward={forward!r}. A Keras loss is the third argument: "
                "make_train_step(model, optimizer, loss)."
            )
        if forward is not None and loss is not None:
            raise LossError(
                "Give either loss or forward, not both: forward returns the LossSum itself. "
                f"Received: loss={loss!r} and forward={forward!r}."
            )
        whole = as_model(model)
        if whole is not model and forward is None:
            raise LossError(
                "A loss compares the outputs of one model with labels. Received: "
                f"{type(model).__name__} of {len(model)} models and no forward. Write "
                "forward=f(models, batch, training), which returns a LossSum."
            )
        objective = loss if isinstance(loss, Objective) else Objective(loss)
        losses = tf.nest.map_structure(
            lambda each: None if each is None else as_loss(each), objective.loss
        )
        objective = dataclasses.replace(objective, loss=losses)
        chosen = None if variables is None else _check_variables(variables, whole)
        return cls(whole, objective, forward, model, chosen)

    @property
    def trained(self) -> list[Any]:
        """The variables to train; a frozen variable is left out."""
        if self.chosen is None:
            return list(self.model.trainable_variables)
        return [variable for variable in self.chosen if variable.trainable]

    def check_metrics(self, metrics: Any) -> None:
        """Checks that the step sees labels and predictions for its metrics."""
        if self.forward is not None and tf.nest.flatten(metrics):
            raise LossError(
                "With forward the step sees no labels and predictions, so it cannot update metrics."
                f" Received: metrics={metrics!r}. Call metric.update_state(y_true, y_pred) "
                "inside forward instead."
            )

    def __call__(self, shard: Any, training: bool) -> tuple[list[LossTerm], list[Output]]:
        """Runs the model on a shard."""
        outputs: list[Output] = []
        with recording_added_losses() as recorded:
            if self.forward is not None:
                with noting_losses_read(self._warn_of_losses):
                    result = self.forward(self.user_model, shard, training)
                terms = _terms_of_forward(result)
            else:
                x, y, weight = unpack_batch(shard)
                names = getattr(self.model, "output_names", None)
                y_pred = self.model(x, training=training)
                losses, factors = self.objective.loss, self.objective.loss_weights
                outputs = match_outputs(y, y_pred, weight, losses, factors, names)
                terms = [_term_of_output(output) for output in outputs if output.loss is not None]
        # As in Keras, another model that the loss calls does not add to this loss.
        own = {id(layer) for layer in all_layers(self.model)} if recorded else set()
        added = [value for layer, value in recorded if id(layer) in own]
        return terms + [_term_of_added(value, count_rows(shard)) for value in added], outputs

    def _warn_of_losses(self, layer: Any) -> None:
        """Warns that ``forward`` reads losses that the step adds by itself."""
        own = {id(one) for one in all_layers(self.model)}  # The model may be given by a proxy.
        if own & {id(one) for one in (layer, *all_layers(layer))}:
            warnings.warn(
                "forward reads the losses of the model, which the step adds by itself: those of "
                "regularizers and of add_loss. In the sum that forward returns they would count "
                f"twice. Received: losses of {layer.name!r}. Leave out sum(model.losses).",
                stacklevel=4,
            )


def stack(terms: Sequence[LossTerm], row_weight: Any) -> tf.Tensor:
    """Returns the sums of the terms, then their weights, as one vector to add over shards."""
    parts = [term.sum for term in terms] + [term.weight for term in terms]
    dtype = tf.float64 if any(part.dtype == tf.float64 for part in parts) else tf.float32
    stats = tf.stack([tf.cast(part, dtype) for part in parts]) if parts else tf.zeros([0])
    return stats if row_weight is None else stats * tf.cast(row_weight, dtype)


def check_weights(layout: Layout, terms: Sequence[LossTerm], values: Sequence[Any]) -> None:
    """Checks that no weight depends on trained variables: only sums are differentiated."""
    weights = [terms[number].weight for number in layout.measured]
    dependent = tf.gradients(weights, list(values)) if weights and values else []
    if any(gradient is not None for gradient in dependent):
        raise LossError(
            "What the loss is divided by depends on trained variables, and a step differentiates "
            "the sum alone. Received: a weight that has a gradient. Write tf.stop_gradient(weight) "
            "if it is to be a constant; else divide by the sum over all replicas: total = "
            "tf.reduce_sum(tmg.gather_rows(weights)); tmg.LossSum(tf.reduce_sum(weights * values) "
            "/ total * rows.total, rows.count) with rows = tmg.rows()."
        )


def regularization(
    variables: Sequence[Any],
    at: Callable[[Any], AbstractContextManager[Any]],
    assigned: Sequence[Any] = (),
) -> tuple[Any, list[Any]]:
    """Returns the weight regularization, which counts once per step, and its gradients."""
    total: Any = tf.zeros([])
    gradients: list[Any] = [None] * len(variables)
    new = assigned or [None] * len(variables)
    for number, variable in enumerate(variables):
        regularizer = getattr(variable, "regularizer", None)
        if regularizer is None:
            continue
        read = [number] if is_part_of_keras(type(regularizer)) else range(len(variables))
        with at(variable):
            values: Any = {
                i: tf.convert_to_tensor(variables[i].value if new[i] is None else new[i])
                for i in read
            }
            with tf.GradientTape() as tape, _reading(variables, values):
                tape.watch(values)
                penalty = tf.cast(tf.reduce_sum(regularizer(values[number])), tf.float32)
            total += penalty
            for i, part in tape.gradient(penalty, values).items():
                if part is not None:
                    gradients[i] = part if gradients[i] is None else gradients[i] + part
    return total, gradients


def _reading(variables: Sequence[Any], values: Mapping[int, Any]) -> AbstractContextManager[Any]:
    """Makes code that reads variables find these values, which a tape can watch anywhere.

    A tape cannot watch a variable with a copy per replica outside the replicas.
    """
    import keras

    class Reading(keras.StatelessScope):  # type: ignore[misc]
        """Scope that assigns to other variables at once, which its base class only records."""

        def add_update(self, update: tuple[Any, Any]) -> None:
            variable, value = update
            if id(variable) in self.state_mapping:
                super().add_update(update)
            else:
                variable.value.assign(value)

    pairs = [(variables[i], v) for i, v in values.items() if hasattr(variables[i], "path")]
    scope: AbstractContextManager[Any] = Reading(pairs)
    return scope


def _check_variables(variables: Any, model: Any) -> tuple[Any, ...]:
    """Returns the variables to train as a tuple, each once."""
    known = {id(variable) for variable in model.variables}
    chosen = list({id(variable): variable for variable in variables}.values())
    strange = [variable for variable in chosen if id(variable) not in known]
    if strange or not chosen:
        received = getattr(strange[0], "path", repr(strange[0])) if strange else "no variable"
        raise ValueError(
            "variables must hold variables of the model that the step is made for. Received: "
            f"{received}. For variables of several models give all of them as the model: "
            "make_train_step([first, second], optimizer, None, forward=...)."
        )
    return tuple(chosen)


def _term_of_output(output: Output) -> LossTerm:
    if output.y_true is None:
        which = "" if output.name is None else f" for output {output.name!r}"
        raise LossError(
            f"There is a loss but no labels{which}. Give batches (x, y) or (x, y, sample_weight), "
            "tuples, for a list is x alone; or, for a loss without labels, "
            "forward=f(model, batch, training)."
        )
    if not callable(output.loss):
        raise LossError(
            "The outputs of a model are one tensor, or a list or dict of tensors. Received: output "
            f"{output.name!r} with several losses. Compute them in forward=."
        )
    term = loss_term(output.loss, output.y_true, output.y_pred, output.sample_weight)
    return dataclasses.replace(term, name=output.name, factor=output.factor)


def _term_of_added(value: Any, rows: Any) -> LossTerm:
    """What a layer adds is a mean over its rows; what has an axis of rows is summed over them."""
    value = tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32)
    if value.shape.rank and value.shape[0] is None:
        total = tf.reduce_sum(value)
        return LossTerm(total, tf.ones_like(total), fixed=True, added=True)
    rows = tf.cast(rows, value.dtype)
    return LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0, added=True)


def _terms_of_forward(result: Any) -> list[LossTerm]:
    """Returns the loss that ``forward`` returned, and the values for the logs beside it."""
    values: Any = {}
    if type(result) is tuple and len(result) == 2 and isinstance(result[1], Mapping):
        result, values = result
    if not isinstance(result, LossSum):
        raise LossError(
            "forward must return a LossSum: the sum of the losses of its examples and the weight "
            f"that divides it. Received: {type(result).__name__}. Return tmg.loss_sum(loss, "
            "y_true, y_pred), or tmg.LossSum(tf.reduce_sum(values), count); with values for the "
            'logs, return loss, {"name": tmg.LossSum(...)}.'
        )
    terms = [_term_of_sum("the loss", result)]
    for name, value in values.items():
        if not isinstance(value, tuple) or len(value) != 2:
            raise LossError(
                "A value for the logs is a sum and the weight that divides it, so that replicas "
                f"can be added. Received: {type(value).__name__} for {name!r}. Write "
                f'"{name}": (tf.reduce_sum(values), count).'
            )
        kind = type(value) if isinstance(value, LossSum) else LossSum
        pair = kind(*(tf.stop_gradient(tf.cast(part, tf.float32)) for part in value))
        terms.append(dataclasses.replace(_term_of_sum(repr(name), pair), name=name, logged=True))
    return terms


def _term_of_sum(what: str, pair: LossSum) -> LossTerm:
    total = tf.convert_to_tensor(pair.sum)
    if total.dtype in (tf.float16, tf.bfloat16):  # Which cannot count many rows.
        total = tf.cast(total, tf.float32)
    if total.shape.rank != 0:
        raise LossError(
            f"The sum in a LossSum is a scalar. Received: shape {tuple(total.shape)} for {what} "
            "from forward. Write tf.reduce_sum(values)."
        )
    weight = tf.cast(pair.weight, total.dtype)
    return LossTerm(total, weight, fixed=isinstance(pair, FixedLossSum) or is_fixed(pair.weight))
