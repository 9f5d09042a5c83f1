"""The law of sums and weights: a loss is a sum over examples and what that sum is divided by.

Sums and weights are only ever added, over micro-batches, replicas and workers, and divided once
after the last addition. That is why the result does not depend on how a batch was cut.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.errors import LossError
from tfmultigpu.losses.row_axes import check_row_axes

__all__ = ["FixedLossSum", "LossSum", "LossTerm", "as_loss", "global_mean", "loss_sum", "loss_term"]


OTHER_ROWS = (
    "The loss returned another number of values than one per row: the model or the loss merges, "
    "drops or adds rows. Give the loss as a function of your own, whose values are counted: "
    "loss=lambda y_true, y_pred: keras_loss_function(y_true, y_pred)."
)


class LossSum(NamedTuple):
    """The loss of one shard, not yet divided.

    Attributes:
        sum: Sum of the weighted losses of the shard's elements, a float scalar.
        weight: The shard's part of what the sum over all shards is divided by, a float scalar:
            the number of elements, or the sum of their weights.
    """

    sum: Any
    weight: Any


class FixedLossSum(LossSum):
    """A loss that is divided by the same weight however many shards are added.

    That is a loss with ``reduction="sum"``: ``weight`` is 1 on every shard, and 1 in all.
    """


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """One additive part of a step's loss on one shard.

    Attributes:
        sum: Sum of the weighted losses, a float scalar that gradients flow through.
        weight: What the sum is divided by once it has been added over all shards.
        per_row: The weight of one row where that should be a constant, so that the weight of a
            global batch is known before its losses are; else None.
        fixed: Whether ``weight`` is the same on every shard and not to be added.
        name: Of the output the loss is for, or None.
        factor: The loss weight of the output.
        added: Whether a layer added it, by ``add_loss``.
    """

    sum: Any
    weight: Any
    per_row: float | None = None
    fixed: bool = False
    name: str | None = None
    factor: float = 1.0
    added: bool = False


def loss_sum(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None, *, row_weight: Any = None
) -> LossSum:
    """Returns the loss of one shard as a sum and a weight.

    Sum and weight follow Keras' reductions, masks on ``y_pred`` included: the weight is the number
    of unmasked elements for ``"sum_over_batch_size"``, ``"mean"`` and per-example functions, the
    sum of the sample weights for ``"mean_with_sample_weight"``, and 1 for ``"sum"``.

    In a batch with fewer rows than replicas every replica holds every row. That cancels where the
    sum is divided by a weight that was added with it, as ``global_mean`` does; for ``"sum"``, and
    for windows of several batches, give ``row_weight``.

    Args:
        loss: A Keras loss, its name, or a function ``f(y_true, y_pred)`` that returns one value per
            example (or per element).
        y_true: Labels, shape ``[rows, ...]``.
        y_pred: Predictions, shape ``[rows, ...]``.
        sample_weight: Weights that broadcast to the losses, shape ``[rows]`` or ``[rows, ...]``.
        row_weight: What each row counts on this replica: ``tmg.data.row_weight(batch)``, handed to
            the replicas with the batch. 1 where None.

    Returns:
        Two float32 scalars (float64 where the loss computes in float64).

    Raises:
        LossError: The loss returns one number for the whole shard, from which the losses of its
            examples cannot be recovered.

    Example:
        >>> import tfmultigpu as tmg
        >>> s, w = tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])
        >>> float(s), float(w)
        (4.0, 2.0)
    """
    term = loss_term(as_loss(loss), y_true, y_pred, sample_weight)
    factor = 1.0 if row_weight is None else tf.cast(row_weight, term.sum.dtype)
    if term.fixed:
        return FixedLossSum(term.sum * factor, term.weight)
    return LossSum(term.sum * factor, term.weight * factor)


def global_mean(loss_sum: LossSum) -> Any:
    """Returns the loss of the global batch, divided once after adding over all replicas.

    Its gradient on each replica is that replica's part of the gradient, so that gradients summed
    over the replicas (which ``optimizer.apply`` of Keras does) are those of one device.

    Args:
        loss_sum: The sum and weight of this replica's shard.

    Returns:
        A float scalar, the same on every replica; 0 where the weight is 0 in all.

    Raises:
        LossError: Called outside ``strategy.run`` under a strategy of several replicas.

    Example:
        >>> import tfmultigpu as tmg
        >>> float(tmg.global_mean(tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])))
        2.0
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise LossError(
            "global_mean adds over replicas, so it must be called by each of them. Call it in the "
            "function given to strategy.run, not beside it."
        )
    fixed = isinstance(loss_sum, FixedLossSum)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def mean(shard_sum: Any, shard_weight: Any) -> Any:
        total, weight = context.all_reduce(tf.distribute.ReduceOp.SUM, [shard_sum, shard_weight])
        weight = shard_weight if fixed else weight
        return tf.math.divide_no_nan(total, weight), lambda upstream: (
            tf.math.divide_no_nan(upstream, weight),
            tf.zeros_like(weight),
        )

    return mean(tf.convert_to_tensor(loss_sum.sum), tf.convert_to_tensor(loss_sum.weight))


def loss_term(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> LossTerm:
    """Returns the loss of one shard as a term of the step's loss; see ``loss_sum``.

    Args:
        loss: What ``as_loss`` returned.
        y_true: Labels.
        y_pred: Predictions.
        sample_weight: Weights, or None.
    """
    unreduced: list[Any] = []
    couples = isinstance(loss, _couples_examples())
    if not couples and _may_mix_axes(loss, y_true, y_pred, sample_weight):
        shapes = y_true, y_pred, sample_weight
        check_row_axes(loss, _elementwise(loss, []), *shapes, throughout=_is_from_keras(loss))
    values = _elementwise(loss, unreduced)(y_true, y_pred, sample_weight)
    # Before weights, which may have the rows that the loss has lost.
    plain = tf.convert_to_tensor(unreduced[0]) if unreduced else values
    if couples or plain.shape.rank == 0:
        raise LossError(
            f"The loss {loss.name!r} is one number for a batch, or compares its examples with each "
            "other. Several replicas then cannot tell what each example contributes, and the "
            f"result depends on how the batch was cut. Received: shape {tuple(plain.shape)} from "
            f"{type(loss).__name__}. Return one value per example that depends on it alone, for "
            "example tf.reduce_mean(tf.square(y_true - y_pred), axis=-1). A loss that couples the "
            "examples of a batch (Dice over a batch, Circle, contrastive) sees all of them by "
            "tmg.gather_rows(y_pred): return the values of this replica's rows, or the one number "
            "for each, tf.fill(tf.shape(y_pred)[:1], value)."
        )
    if _lost_the_rows(plain, y_pred):
        raise LossError(
            f"The loss {loss.name!r} returns {plain.shape[0]} values whatever the number of rows, "
            "so it reduces over them and the result depends on how the batch was cut. Received: "
            f"shape {tuple(plain.shape)} from predictions of shape {tuple(y_pred.shape)}. Reduce "
            "over the last axis, axis=-1, to return one value per example. If examples are to be "
            "compared with each other, do so in forward= with tmg.gather_rows(predictions)."
        )
    total = tf.reduce_sum(values)
    if loss.reduction == "sum":
        return LossTerm(total, tf.ones_like(total), fixed=True)
    # A loss may mask its values itself (ignore_class); weighting them has dropped that mask.
    mask = _mask(y_pred, unreduced[0] if unreduced else values)
    if loss.reduction == "mean_with_sample_weight" and (
        sample_weight is not None or mask is not None
    ):
        weights = _sum_of_weights(sample_weight, mask, total.dtype)
        if mask is None and _has_no_rows(sample_weight, values):
            mean = tf.math.divide_no_nan(total, weights)  # By the same however many rows there are.
            return LossTerm(mean, tf.ones_like(total), fixed=True)
        return LossTerm(total, weights)
    elements = tf.cast(tf.size(values), total.dtype)
    if mask is not None:
        valid = tf.cast(tf.math.count_nonzero(mask), total.dtype)
        return LossTerm(total, valid * elements / tf.cast(tf.size(mask), total.dtype))
    # A function may flatten, drop or add rows; Keras' own losses return one entry for each.
    per_row = values.shape[1:].num_elements() if _is_from_keras(loss) else None
    return LossTerm(total, elements, float(per_row) if per_row else None)


def _elementwise(loss: Any, unreduced: list[Any]) -> Callable[..., Any]:
    """The weighted values of a loss; those without weights are put into ``unreduced``."""

    def call(y_true: Any, y_pred: Any) -> Any:
        unreduced.append(loss.call(y_true, y_pred))
        return unreduced[-1]

    # Not copy.copy: that serialises a Keras object, and a user's own loss does not survive it.
    elementwise = object.__new__(type(loss))
    vars(elementwise).update(vars(loss))
    elementwise.reduction = "none"
    elementwise.call = call
    return functools.partial(_call_weighted, elementwise)


def _call_weighted(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    return loss(y_true, y_pred, sample_weight=sample_weight)


def as_loss(loss: Any) -> Any:
    """Returns a loss as a ``keras.losses.Loss``.

    Args:
        loss: A Keras loss, its name, or a function ``f(y_true, y_pred)`` of per-example values.

    Raises:
        LossError: It is none of these, or a name that Keras does not know.
    """
    import keras

    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            raise LossError(
                f"Keras knows no loss of this name. Received: loss={loss!r}. Give a name such as "
                "'mse' or 'sparse_categorical_crossentropy', a keras.losses object or a function."
            ) from None
    if isinstance(loss, keras.losses.Loss):
        return loss
    if loss is getattr(keras.losses, "circle", None):
        return keras.losses.Circle()
    if isinstance(loss, type) and issubclass(loss, keras.losses.Loss):
        raise LossError(
            f"The loss is a class, not an object. Received: {loss.__name__}. Write "
            f"{loss.__name__}(), with parentheses."
        )
    if not callable(loss):
        raise LossError(
            f"This is not a loss. Received: {loss!r}. Give a keras.losses object, its name, or a "
            "function f(y_true, y_pred) that returns one value per example."
        )
    return _function_loss(loss)


def _may_mix_axes(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> bool:
    """Whether anything may be broadcast along rows; a loss of Keras does not where ranks agree."""
    shapes = [getattr(one, "shape", ()) for one in tf.nest.flatten([y_true, y_pred])]
    ranks = {tf.TensorShape(shape).rank for shape in shapes}
    return sample_weight is not None or len(ranks) > 1 or not _is_from_keras(loss)


def _has_no_rows(sample_weight: Any, values: Any) -> bool:
    """Whether weights are the same for every row: they broadcast along the axis of the rows."""
    weight, values = _same_rank(tf.convert_to_tensor(sample_weight), values)
    if weight.shape.rank is None or weight.shape.rank < values.shape.rank:
        return weight.shape.rank is not None
    return bool(weight.shape[0] == 1 and values.shape[0] != 1)


def _lost_the_rows(values: Any, y_pred: Any) -> bool:
    shape = getattr(y_pred, "shape", None)
    if shape is None or not tf.TensorShape(shape).rank:
        return False
    return values.shape[0] is not None and shape[0] is None


def _is_from_keras(loss: Any) -> bool:
    function = getattr(loss, "wrapped", None)
    source = type(loss) if function is None else function
    return is_part_of_keras(source)


def _couples_examples() -> tuple[type, ...]:
    """Losses whose value for one example depends on the others of its batch."""
    import keras

    circle = getattr(keras.losses, "Circle", None)
    return () if circle is None else (circle,)


def _function_loss(function: Callable[[Any, Any], Any]) -> Any:
    import keras

    class FunctionLoss(keras.losses.Loss):  # type: ignore[misc]
        """A function of per-example values, with its arguments brought to one rank as in Keras."""

        wrapped = staticmethod(function)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            if not tf.nest.is_nested(y_true) and not tf.nest.is_nested(y_pred):
                y_true, y_pred = _same_rank(y_true, y_pred)
            return function(y_true, y_pred)

    name = getattr(function, "__name__", type(function).__name__)
    return FunctionLoss(name=re.sub(r"\W", "", name))  # Keras opens a scope of this name.


def _same_rank(first: Any, second: Any) -> tuple[Any, Any]:
    """Adds or removes a last axis of size 1 where the ranks differ by one, as Keras does."""
    ranks = first.shape.rank, second.shape.rank
    if None in ranks or abs(ranks[0] - ranks[1]) != 1:
        return first, second
    longer, shorter = (first, second) if ranks[0] > ranks[1] else (second, first)
    if longer.shape[-1] == 1:
        if shorter.shape.rank == 1:
            shorter = shorter[..., None]
        else:
            longer = tf.squeeze(longer, -1)
    return (longer, shorter) if ranks[0] > ranks[1] else (shorter, longer)


def _mask(y_pred: Any, values: Any) -> Any:
    """The mask Keras' own losses apply: of the predictions and of the losses, where both are."""
    masks = [_compat.keras_mask(y_pred), _compat.keras_mask(values)]
    present = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    if not present:
        return None
    return present[0] if len(present) == 1 else present[0] & present[1]


def _sum_of_weights(sample_weight: Any, mask: Any, dtype: tf.DType) -> Any:
    if sample_weight is None:
        return tf.cast(tf.math.count_nonzero(mask), dtype)
    weight = tf.cast(sample_weight, dtype)
    if mask is None:
        return tf.reduce_sum(weight)
    kept, weight = _same_rank(tf.cast(mask, dtype), weight)
    return tf.reduce_sum(weight * kept)
