"""What a step minimises on one shard: the terms of its loss, and how they are put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import _bridge
from tfmultigpu import rows as rows_lib
from tfmultigpu.errors import LossError, MetricError
from tfmultigpu.losses import OTHER_ROWS, FixedLossSum, LossSum, LossTerm, as_loss, loss_term
from tfmultigpu.outputs import Output, match_outputs, unpack_batch

__all__ = ["Layout", "Objective", "OutputLoss", "regularization", "stack"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A model and its loss, as a function from a shard to additive terms.

    Attributes:
        model: The Keras model.
        losses: One Keras loss, or a dict or list of them, or None.
        loss_weights: Factors of the outputs' losses, or None.
        forward: ``f(model, batch, training) -> LossSum`` in place of a loss, or None.
    """

    model: Any
    losses: Any
    loss_weights: Any = None
    forward: Callable[[Any, Any, bool], LossSum] | None = None

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
        return cls(model, losses, loss_weights, forward)

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
        outputs: list[Output] = []
        with _bridge.recording_added_losses() as added:
            if self.forward is not None:
                terms = [_forward_term(self.forward(self.model, shard, training))]
            else:
                x, y, weight = unpack_batch(shard)
                names = getattr(self.model, "output_names", None)
                y_pred = self.model(x, training=training)
                outputs = match_outputs(y, y_pred, weight, self.losses, self.loss_weights, names)
                terms = [_output_term(output) for output in outputs if output.loss is not None]
        rows = rows_lib.count_rows(shard)
        return terms + [_mean_term(value, rows) for value in added], outputs


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
            weight = total if i == 0 else weight
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
        variables: Keras variables, which carry their ``regularizer``.

    Returns:
        A float32 scalar, and one gradient per variable (None for those without regularizer).
    """
    total: Any = tf.zeros([])
    gradients: list[Any] = []
    for variable in variables:
        if getattr(variable, "regularizer", None) is None:
            gradients.append(None)
            continue
        value = tf.convert_to_tensor(variable.value)
        with tf.GradientTape() as tape:
            tape.watch(value)
            penalty = tf.reduce_sum(variable.regularizer(value))
        total += tf.cast(penalty, tf.float32)
        gradients.append(tape.gradient(penalty, value))
    return total, gradients


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


def _mean_term(value: Any, rows: Any) -> LossTerm:
    """A loss that a layer computed as a mean over the shard."""
    value = tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32)
    rows = tf.cast(rows, value.dtype)
    return LossTerm(tf.reduce_sum(value) * rows, rows, per_row=1.0)
