"""What a step minimises on one shard: the terms of its loss, and how they are put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import unpack_batch
from tfmultigpu.errors import LossError, MetricError
from tfmultigpu.losses.added_losses import AddedLosses, mean_term
from tfmultigpu.losses.loss_sum import (
    OTHER_ROWS,
    FixedLossSum,
    LossSum,
    LossTerm,
    as_loss,
    loss_term,
)
from tfmultigpu.losses.outputs import Output, match_outputs
from tfmultigpu.losses.recording import recording_added_losses
from tfmultigpu.strategies.scopes import all_layers

__all__ = ["Layout", "Objective", "OutputLoss", "regularization", "stack"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A model and its loss, as a function from a shard to additive terms.

    Attributes:
        model: The Keras model.
        losses: One Keras loss, or a dict or list of them, or None.
        loss_weights: Factors of the outputs' losses, or None.
        forward: ``f(model, batch, training) -> LossSum`` in place of a loss, or None.
        added: Finds out which losses that layers add are sums; None where all may count as means,
            because each batch is computed in one piece.
    """

    model: Any
    losses: Any
    loss_weights: Any = None
    forward: Callable[[Any, Any, bool], LossSum] | None = None
    added: AddedLosses | None = None

    @classmethod
    def of(cls, model: Any, loss: Any, loss_weights: Any = None, forward: Any = None) -> Objective:
        """Checks and resolves what a user gives.

        Raises:
            LossError: Both or neither of ``loss`` and ``forward``, or something that is no loss.
        """
        if forward is not None and loss is not None:
            raise LossError(
                "Give either loss or forward, not both: forward returns the LossSum itself. "
                f"Received: loss={loss!r} and forward={forward!r}."
            )
        losses = tf.nest.map_structure(lambda one: None if one is None else as_loss(one), loss)
        return cls(model, losses, loss_weights, forward, AddedLosses())

    def check_metrics_allowed(self, *metrics: Any) -> None:
        """Checks that there are labels and predictions for metrics to look at.

        Raises:
            MetricError: There are metrics beside ``forward``.
        """
        if self.forward is not None and any(tf.nest.flatten(one) for one in metrics):
            raise MetricError(
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
            rows = partition.count_rows(shard)
            return terms + [mean_term(value, rows) for value in values], outputs
        again = self._added_by_layers
        return terms + self.added.terms(values, shard, self.model, training, again), outputs

    def _call(self, shard: Any, training: bool) -> tuple[list[LossTerm], list[Output], list[Any]]:
        """The terms of the loss without what layers add, the outputs, and what layers add."""
        outputs: list[Output] = []
        with recording_added_losses() as recorded:
            if self.forward is not None:
                terms = [_forward_term(self.forward(self.model, shard, training))]
            else:
                x, y, weight = unpack_batch(shard)
                names = getattr(self.model, "output_names", None)
                y_pred = self.model(x, training=training)
                outputs = match_outputs(y, y_pred, weight, self.losses, self.loss_weights, names)
                terms = [_output_term(output) for output in outputs if output.loss is not None]
        # As in Keras, a model that the loss calls does not add to the loss of this one.
        own = {id(layer) for layer in all_layers(self.model)} if recorded else set()
        return terms, outputs, [value for layer, value in recorded if id(layer) in own]

    def _added_by_layers(self, shard: Any, training: bool) -> list[Any]:
        return self._call(shard, training)[2]


class OutputLoss(str):
    """The key of one output's loss in the logs, ``"NAME_loss"``, which knows what to do with it.

    Attributes:
        factor: What the loss is multiplied by in the loss of the step.
        weight: The key of what its sum was divided by, ``"NAME_weight"``.
    """

    factor: float
    weight: str

    def __new__(cls, name: str, factor: float) -> OutputLoss:
        """Takes the name of the output and its loss weight."""
        key = super().__new__(cls, f"{name}_loss")
        key.factor, key.weight = factor, f"{name}_weight"
        return key


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the terms of a loss have in common on every shard: all but their values.

    Attributes:
        terms: The terms, of which only name, factor, ``per_row`` and ``fixed`` are used.
    """

    terms: tuple[LossTerm, ...]

    @classmethod
    def of(cls, terms: Sequence[LossTerm]) -> Layout:
        """Forgets the values."""
        return cls(tuple(dataclasses.replace(term, sum=None, weight=None) for term in terms))

    @property
    def measured(self) -> list[int]:
        """Which terms have a weight that is only known once it was added over all shards."""
        return [i for i, term in enumerate(self.terms) if term.per_row is None and not term.fixed]

    def scales(self, global_rows: Any) -> list[Any]:
        """Returns what each term's sum is multiplied by before the backward pass.

        Where the weight of the global batch follows from its rows this is the whole division, so
        that gradients need none after they were added. Otherwise it is a constant that every
        replica shares, which keeps float16 gradients small, and ``corrections`` does the rest.
        """
        return [
            term.factor / (1.0 if term.fixed else global_rows * (term.per_row or 1.0))
            for term in self.terms
        ]

    def corrections(self, weights: Sequence[Any], global_rows: Any) -> list[Any]:
        """Returns what the summed gradients of the measured terms are multiplied by."""
        measured = [weights[i] for i in self.measured]
        return [tf.math.divide_no_nan(tf.cast(global_rows, w.dtype), w) for w in measured]

    def check(self, weights: Sequence[Any], global_rows: Any) -> list[tf.Operation]:
        """Returns assertions that the weights ``scales`` divided by are the ones that came out."""
        return [
            # Not tf.debugging.Assert, which makes two branches of it.
            tf.raw_ops.Assert(
                condition=abs(weight / tf.cast(global_rows * term.per_row, weight.dtype) - 1)
                < 1e-3,
                data=[OTHER_ROWS, weight, global_rows],
            )
            for term, weight in zip(self.terms, weights, strict=True)
            if term.per_row is not None
        ]

    def unstack(self, stats: Any) -> tuple[list[Any], list[Any]]:
        """Returns the sums and the weights of the terms from what ``stack`` returned."""
        values = tf.unstack(stats, num=2 * len(self.terms))
        return values[: len(self.terms)], values[len(self.terms) :]

    def report(self, sums: Any, weights: Sequence[Any], global_rows: Any) -> dict[str, Any]:
        """Returns the loss, its weight, and those of each output, from values added up.

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
            loss += term.factor * mean
            if term.name is not None:
                key = OutputLoss(term.name, term.factor)
                logs |= {key: mean, key.weight: tf.cast(total, tf.float32)}
            weight = total if i == 0 and not term.added else weight
        if weight is None or logs:
            weight = global_rows
        return {"loss": loss, "weight": tf.cast(weight, tf.float32), **logs}


def stack(terms: Sequence[LossTerm], row_weight: Any) -> tf.Tensor:
    """Returns the sums of the terms, then their weights, as one vector to be added over shards.

    Args:
        terms: The terms of the loss on one shard.
        row_weight: What each row of the shard counts, a scalar, or None for 1.
    """
    parts = [term.sum for term in terms] + [term.weight for term in terms]
    dtype = tf.float64 if any(part.dtype == tf.float64 for part in parts) else tf.float32
    stats = tf.stack([tf.cast(part, dtype) for part in parts]) if parts else tf.zeros([0])
    return stats if row_weight is None else stats * tf.cast(row_weight, dtype)


def regularization(variables: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the weight regularisation and its gradient; it counts once per step.

    Args:
        variables: Keras variables, which carry their ``regularizer``. It may read any of them.

    Returns:
        A float32 scalar, and one gradient per variable (None for those it does not depend on).
    """
    own = [getattr(variable, "regularizer", None) for variable in variables]
    if all(regularizer is None for regularizer in own):
        return tf.zeros([]), [None] * len(variables)
    # Those of Keras look at nothing but their own variable; the others are not read.
    free = any(one is not None and not is_part_of_keras(type(one)) for one in own)
    pairs = zip(variables, own, strict=True)
    values = [tf.convert_to_tensor(v.value) if free or r is not None else None for v, r in pairs]
    read = [value for value in values if value is not None]
    with tf.GradientTape() as tape, _reading(variables, values) if free else nullcontext():
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


def _reading(variables: Sequence[Any], values: Sequence[Any]) -> AbstractContextManager[Any]:
    """Has code that reads variables find these values, which a tape can watch wherever it runs.

    A variable with a copy on each replica cannot be watched outside the replicas.
    """
    import keras

    class Reading(keras.StatelessScope):  # type: ignore[misc]
        """Assigns to other variables at once, where its base only notes it."""

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
            "There is a loss but no labels. A batch is (x, y) or (x, y, sample_weight); give "
            "forward=f(model, batch, training) for a loss without labels."
        )
    term = loss_term(output.loss, output.y_true, output.y_pred, output.sample_weight)
    return dataclasses.replace(term, name=output.name, factor=output.factor)


def _forward_term(result: Any) -> LossTerm:
    if not isinstance(result, LossSum):
        raise LossError(
            "forward must return a LossSum: the sum of the losses of its examples and the weight "
            f"to divide by. Received: {type(result).__name__}. Return "
            "tmg.loss_sum(loss, y_true, y_pred), or tmg.LossSum(tf.reduce_sum(values), count)."
        )
    total = tf.convert_to_tensor(result.sum)
    if total.shape.rank != 0:
        raise LossError(
            f"The sum in a LossSum is a scalar. Received: shape {tuple(total.shape)} from forward. "
            "Write tf.reduce_sum(values)."
        )
    weight = tf.cast(result.weight, total.dtype)
    return LossTerm(total, weight, fixed=isinstance(result, FixedLossSum))
