"""Objective of a step: the terms of its loss on one shard, and their combination."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.accumulation.loss_sum import (
    OTHER_ROWS,
    FixedLossSum,
    LossSum,
    LossTerm,
    as_loss,
    loss_term,
)
from tfmultigpu.data.batch_format import count_rows, unpack_batch
from tfmultigpu.errors import LossError
from tfmultigpu.losses.added_losses import AddedLosses, mean_term
from tfmultigpu.losses.model_group import as_model, check_variables
from tfmultigpu.losses.outputs import Output, match_outputs
from tfmultigpu.losses.recording import noting_losses_read, recording_added_losses
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.strategies.variable_sharding import is_sharded

__all__ = ["Layout", "MeanKey", "Objective", "is_loss", "regularization", "stack"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Model and its loss, as a function from a shard to additive terms.

    Attributes:
        model: The Keras model.
        losses: One Keras loss, a dict or list of them, or None.
        loss_weights: Factors of the outputs' losses, or None.
        forward: ``f(model, batch, training)`` in place of a loss, or None.
        given: The first argument of ``forward``: the model or the models, as the user gave them.
        variables: The variables to train; None means those of the model.
        added: Tells which losses added by layers are sums; None if all may count as means, because
            each batch is computed in one piece.
    """

    model: Any
    losses: Any
    loss_weights: Any = None
    forward: Callable[[Any, Any, bool], Any] | None = None
    given: Any = None
    variables: tuple[Any, ...] | None = None
    added: AddedLosses | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        loss: Any,
        loss_weights: Any = None,
        forward: Any = None,
        variables: Any = None,
    ) -> Objective:
        """Creates an objective from user arguments.

        Raises:
            LossError: Both ``loss`` and ``forward`` are given, there are several models and no
                ``forward``, or the loss is not a loss.
            TypeError: ``forward`` is not a function.
            ValueError: ``variables`` holds something that is not a variable of the model.
        """
        if forward is not None and not callable(forward):
            raise TypeError(
                "forward must be a function f(model, batch, training). Received: "
                f"forward={forward!r}. A Keras loss is the third argument: "
                "make_train_step(model, optimizer, loss)."
            )
        whole = as_model(model)
        if whole is not model and forward is None:
            raise LossError(
                "A loss compares the outputs of one model with labels. Received: "
                f"{type(model).__name__} of {len(model)} models and no forward. Write "
                "forward=f(models, batch, training), which returns a LossSum."
            )
        if forward is not None and loss is not None:
            raise LossError(
                "Give either loss or forward, not both: forward returns the LossSum itself. "
                f"Received: loss={loss!r} and forward={forward!r}."
            )
        losses = tf.nest.map_structure(lambda one: None if one is None else as_loss(one), loss)
        chosen = None if variables is None else check_variables(variables, whole)
        return cls(whole, losses, loss_weights, forward, model, chosen, AddedLosses())

    @property
    def trained(self) -> list[Any]:
        """The variables to train; a frozen variable is left out."""
        if self.variables is None:
            return list(self.model.trainable_variables)
        return [variable for variable in self.variables if variable.trainable]

    def check_metrics_allowed(self, *metrics: Any) -> None:
        """Checks that the step sees labels and predictions for its metrics.

        Raises:
            LossError: Metrics are given beside ``forward``.
        """
        if self.forward is not None and any(tf.nest.flatten(one) for one in metrics):
            raise LossError(
                "With forward the step sees no labels and predictions, so it cannot update metrics."
                f" Received: metrics={metrics[0]!r}. Call metric.update_state(y_true, y_pred) "
                "inside forward instead."
            )

    def __call__(self, shard: Any, training: bool) -> tuple[list[LossTerm], list[Output]]:
        """Runs the model on a shard.

        Returns:
            The terms of the loss, and the outputs for metrics (none with ``forward``).
        """
        terms, outputs, values = self._call(shard, training)
        if self.added is None:
            rows = count_rows(shard)
            return terms + [mean_term(value, rows) for value in values], outputs
        again = self._added_by_layers
        return terms + self.added.terms(values, shard, self.model, training, again), outputs

    def _call(self, shard: Any, training: bool) -> tuple[list[LossTerm], list[Output], list[Any]]:
        """Returns the terms of the loss, the outputs, and the losses that layers add."""
        outputs: list[Output] = []
        with recording_added_losses() as recorded:
            if self.forward is not None:
                with noting_losses_read(self._warn_of_losses):
                    result = self.forward(self.given, shard, training)
                terms = _forward_terms(result)
            else:
                x, y, weight = unpack_batch(shard)
                names = getattr(self.model, "output_names", None)
                y_pred = self.model(x, training=training)
                outputs = match_outputs(y, y_pred, weight, self.losses, self.loss_weights, names)
                terms = [_output_term(output) for output in outputs if output.loss is not None]
        # As in Keras, another model that the loss calls does not add to this loss.
        own = {id(layer) for layer in all_layers(self.model)} if recorded else set()
        return terms, outputs, [value for layer, value in recorded if id(layer) in own]

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

    def regularization(self, variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the weight regularization and its gradient."""
        return regularization(variables)

    def _added_by_layers(self, shard: Any, training: bool) -> list[Any]:
        return self._call(shard, training)[2]


class MeanKey(str):
    """Key in the logs of a mean that has another weight than the loss.

    Attributes:
        factor: Factor of the mean in the loss of the step; None if it is only logged.
        weight: Key of the divisor of its sum, ``"NAME_weight"``.
        sum: Key of the sum, ``"NAME_sum"``, if that is logged: without weight a mean is 0.
    """

    factor: float | None
    weight: str
    sum: str | None = None

    @classmethod
    def of(cls, term: LossTerm) -> MeanKey:
        """Creates the key of a named term: ``"NAME_loss"``, or ``"NAME"`` if it is only logged."""
        key = cls(term.name if term.logged else f"{term.name}_loss")
        key.factor, key.weight = None if term.logged else term.factor, f"{term.name}_weight"
        key.sum = f"{term.name}_sum" if term.logged else None
        return key


def is_loss(name: str) -> bool:
    """Returns whether a key of the logs is that of the loss, or of the loss of an output."""
    return name == "loss" or (isinstance(name, MeanKey) and name.factor is not None)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the terms of a loss, the same on every shard: everything but their values.

    Attributes:
        terms: The terms; only name, factor, ``per_row``, ``fixed`` and ``added`` are used.
    """

    terms: tuple[LossTerm, ...]

    @classmethod
    def of(cls, terms: Sequence[LossTerm]) -> Layout:
        """Creates the layout of these terms."""
        return cls(tuple(dataclasses.replace(term, sum=None, weight=None) for term in terms))

    @property
    def measured(self) -> list[int]:
        """Numbers of the terms whose weight is known only after it was added over all shards."""
        return [
            i
            for i, term in enumerate(self.terms)
            if term.per_row is None and not term.fixed and not term.logged
        ]

    def scales(self, global_rows: Any) -> list[Any]:
        """Returns the factor of each term's sum before the backward pass.

        If the weight of the global batch follows from its rows, the factor is the whole division,
        and gradients need none after they were added. Otherwise it is a constant that all replicas
        share, which keeps float16 gradients small; ``corrections`` does the rest.
        """
        return [
            term.factor / (1.0 if term.fixed else global_rows * (term.per_row or 1.0))
            for term in self.terms
        ]

    def corrections(self, weights: Sequence[Any], global_rows: Any) -> list[Any]:
        """Returns the factors of the summed gradients of the measured terms."""
        measured = [weights[i] for i in self.measured]
        return [tf.math.divide_no_nan(tf.cast(global_rows, w.dtype), w) for w in measured]

    def check(self, weights: Sequence[Any], global_rows: Any) -> list[tf.Operation]:
        """Returns assertions that the weights are those that ``scales`` divided by."""
        return [
            # tf.debugging.Assert would add two branches.
            tf.raw_ops.Assert(
                condition=abs(weight / tf.cast(global_rows * term.per_row, weight.dtype) - 1)
                < 1e-3,
                data=[OTHER_ROWS, weight, global_rows],
            )
            for term, weight in zip(self.terms, weights, strict=True)
            if term.per_row is not None
        ]

    def unstack(self, stats: Any) -> tuple[list[Any], list[Any]]:
        """Returns the sums and the weights of the terms from a result of ``stack``."""
        values = tf.unstack(stats, num=2 * len(self.terms))
        return values[: len(self.terms)], values[len(self.terms) :]

    def report(self, sums: Any, weights: Sequence[Any], global_rows: Any) -> dict[str, Any]:
        """Returns the loss and its weight, and those of each output, from summed values.

        Args:
            sums: The summed sum of each term.
            weights: The summed weight of each term.
            global_rows: Rows of the global batch, a float scalar.
        """
        loss: Any = tf.zeros([])
        logs: dict[str, Any] = {}
        weight = None
        for i, term in enumerate(self.terms):
            total = tf.ones_like(weights[i]) if term.fixed else weights[i]
            mean = tf.cast(
                tf.math.divide_no_nan(sums[i], tf.cast(total, sums[i].dtype)), tf.float32
            )
            if not term.logged:
                loss += term.factor * mean
            if term.name is not None:
                key = MeanKey.of(term)
                logs |= {key: mean, key.weight: tf.cast(total, tf.float32)}
                logs |= {} if key.sum is None else {key.sum: tf.cast(sums[i], tf.float32)}
            weight = total if i == 0 and not term.added else weight
        if weight is None or self.terms[0].name is not None:
            weight = global_rows
        return {"loss": loss, "weight": tf.cast(weight, tf.float32), **logs}


def stack(terms: Sequence[LossTerm], row_weight: Any) -> tf.Tensor:
    """Returns the sums of the terms, then their weights, as one vector to add over shards.

    Args:
        terms: The terms of the loss on one shard.
        row_weight: The weight of each row of the shard, a scalar; None: 1.
    """
    parts = [term.sum for term in terms] + [term.weight for term in terms]
    dtype = tf.float64 if any(part.dtype == tf.float64 for part in parts) else tf.float32
    stats = tf.stack([tf.cast(part, dtype) for part in parts]) if parts else tf.zeros([0])
    return stats if row_weight is None else stats * tf.cast(row_weight, dtype)


def regularization(variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the weight regularization and its gradient; it counts once per step.

    Args:
        variables: Keras variables with their ``regularizer``, which may read any of them.

    Returns:
        A float32 scalar, and one gradient per variable (None without a dependence).
    """
    own = [getattr(variable, "regularizer", None) for variable in variables]
    if all(regularizer is None for regularizer in own):
        return tf.zeros([]), [None] * len(variables)
    # A Keras regularizer reads only its own variable.
    read_all = any(one is not None and not is_part_of_keras(type(one)) for one in own)
    if not read_all and any(is_sharded(variable) for variable in variables):
        return _penalties_in_place(variables, own)
    pairs = zip(variables, own, strict=True)
    values = [
        tf.convert_to_tensor(v.value) if read_all or r is not None else None for v, r in pairs
    ]
    read = [value for value in values if value is not None]
    with tf.GradientTape() as tape, _reading(variables, values) if read_all else nullcontext():
        tape.watch(read)
        penalties = [
            tf.reduce_sum(regularizer(value))
            for regularizer, value in zip(own, values, strict=True)
            if regularizer is not None
        ]
    total: Any = tf.zeros([])
    for penalty in penalties:
        total += tf.cast(penalty, tf.float32)
    found = iter(tape.gradient(penalties, read))
    return total, [None if value is None else next(found) for value in values]


def _penalties_in_place(variables: Sequence[Any], own: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the same, and computes what depends on a sharded variable on its device."""
    total: Any = tf.zeros([])
    gradients: list[Any] = []
    for variable, regularizer in zip(variables, own, strict=True):
        if regularizer is None:
            gradients.append(None)
            continue
        device = variable.value.device if is_sharded(variable) else None
        with _on(device), tf.GradientTape() as tape:
            value = tf.convert_to_tensor(variable.value)
            tape.watch(value)
            penalty = tf.reduce_sum(regularizer(value))
        with _on(device):
            gradients.append(tape.gradient(penalty, value))
        total += tf.cast(penalty, tf.float32)
    return total, gradients


def _on(device: str | None) -> AbstractContextManager[Any]:
    place: AbstractContextManager[Any] = nullcontext() if device is None else tf.device(device)
    return place


def _reading(variables: Sequence[Any], values: Sequence[Any]) -> AbstractContextManager[Any]:
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

    pairs = zip(variables, values, strict=True)
    mapping = [(one, value) for one, value in pairs if isinstance(one, keras.Variable)]
    scope: AbstractContextManager[Any] = Reading(mapping)
    return scope


def _output_term(output: Output) -> LossTerm:
    if output.y_true is None:
        raise LossError(
            "There is a loss but no labels. Give batches (x, y) or (x, y, sample_weight), or, for "
            "a loss without labels, forward=f(model, batch, training)."
        )
    term = loss_term(output.loss, output.y_true, output.y_pred, output.sample_weight)
    return dataclasses.replace(term, name=output.name, factor=output.factor)


def _forward_terms(result: Any) -> list[LossTerm]:
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
    return [_forward_term("the loss", result), *(_logged(*one) for one in values.items())]


def _logged(name: str, value: Any) -> LossTerm:
    if name in _LOGS or name.endswith(("_weight", "_sum")) or name.startswith("val_"):
        raise LossError(
            f"A step or a validation logs {name!r} itself. Received: {name!r} among the values of "
            "forward. Take another name."
        )
    if not isinstance(value, tuple) or len(value) != 2:
        raise LossError(
            "A value for the logs is a sum and the weight that divides it, so that replicas can "
            f"be added. Received: {type(value).__name__} for {name!r}. Write "
            f'"{name}": (tf.reduce_sum(values), count).'
        )
    pair = value if isinstance(value, LossSum) else LossSum(*value)
    pair = type(pair)(*(tf.stop_gradient(tf.cast(one, tf.float32)) for one in pair))
    return dataclasses.replace(_forward_term(repr(name), pair), name=name, logged=True)


_LOGS = ("loss", "weight", "gradient_norm", "skipped", "loss_scale", "steps", "rows", "terms")


def _forward_term(what: str, result: LossSum) -> LossTerm:
    total = tf.convert_to_tensor(result.sum)
    if total.dtype in (tf.float16, tf.bfloat16):  # Which cannot count many rows.
        total = tf.cast(total, tf.float32)
    if total.shape.rank != 0:
        raise LossError(
            f"The sum in a LossSum is a scalar. Received: shape {tuple(total.shape)} for {what} "
            "from forward. Write tf.reduce_sum(values)."
        )
    weight = tf.cast(result.weight, total.dtype)
    return LossTerm(total, weight, fixed=isinstance(result, FixedLossSum))
