"""Losses as sums over examples, and the weights that divide them after the last addition."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.gradients import BY_HAND
from tfmultigpu.accumulation.row_axes import check_row_axes
from tfmultigpu.errors import LossError

OTHER_ROWS = (
    "The loss did not return one value per row: the model or the loss merges, drops or adds rows. "
    "Give the loss as a function, whose values are counted: loss=lambda y_true, y_pred: "
    "keras_loss_function(y_true, y_pred)."
)
# An attribute of weights that stay 1, as Keras' mask is one. It is lost where a ``tf.function`` of
# the user returns the pair, whose class is kept; a pair that the user makes keeps it.
_FIXED = "_tfmultigpu_fixed"


class LossSum(NamedTuple):
    """The loss of one shard, not yet divided.

    Attributes:
        sum: Sum of the weighted losses of the shard's elements, a float scalar.
        weight: The shard's part of the divisor, a float scalar: the number of elements, or the sum
            of their weights. It counts as a constant, so it may not depend on trained variables.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.LossSum(sum=6.0, weight=3.0)  # A ``forward`` of one's own may return this.
        LossSum(sum=6.0, weight=3.0)
    """

    sum: Any
    weight: Any


class FixedLossSum(LossSum):
    """Loss with ``reduction="sum"``, whose weight is 1 in total, however often it is added."""


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """Additive part of a step's loss on one shard."""

    sum: Any
    weight: Any  # What divides the sum, after both were added over all shards.
    per_row: float | None = None  # The weight of a row, if that is a constant.
    fixed: bool = False  # Whether the weight is that of each shard, and is not added.
    name: str | None = None  # The output.
    factor: float = 1.0  # The loss weight of the output.
    added: bool = False  # Whether a layer added it, by ``add_loss``.
    logged: bool = False  # Whether it is a value for the logs alone.


def loss_sum(
    loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None, *, row_weight: Any = None
) -> LossSum:
    """Returns the loss of one shard as a sum and a weight.

    Sum and weight follow Keras' reductions, masks on ``y_pred`` included: the weight is the number
    of unmasked elements for ``"sum_over_batch_size"``, ``"mean"`` and per-example functions, the
    sum of the sample weights for ``"mean_with_sample_weight"``, and 1 over all replicas for
    ``"sum"``.

    Args:
        loss: A Keras loss, its name, or a function ``f(y_true, y_pred)`` that returns one value per
            example (or per element).
        y_true: Labels, shape ``[rows, ...]``.
        y_pred: Predictions, shape ``[rows, ...]``.
        sample_weight: Weights that broadcast to the losses, shape ``[rows]`` or ``[rows, ...]``.
        row_weight: The weight of each row on this replica: ``tmg.data.row_weight(batch)``, given to
            the replicas with a batch of ``distribute_dataset(..., small_batches="copy")``. None: 1.

    Returns:
        Two float32 scalars (float64 if the loss computes in float64).

    Raises:
        LossError: The loss returns one number for the whole shard, or values that are not of rows.

    Example:
        >>> import tfmultigpu as tmg
        >>> s, w = tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])
        >>> float(s), float(w)
        (4.0, 2.0)
    """
    term = loss_term(as_loss(loss), y_true, y_pred, sample_weight)
    factor = tf.cast(1.0 if row_weight is None else row_weight, term.sum.dtype)
    if factor.shape.rank:
        raise LossError(
            f"row_weight is a scalar, as of tmg.data.row_weight(batch). Received: shape "
            f"{tuple(factor.shape)}. Weights of the rows are sample_weight=weights."
        )
    if term.fixed:
        # The weights of the replicas add up to 1, also where a function of the user's, which
        # returns other tensors, loses the mark.
        context = tf.distribute.get_replica_context()
        weight = term.weight / (1 if context is None else context.num_replicas_in_sync)
        setattr(weight, _FIXED, True)
        return FixedLossSum(term.sum * factor, weight)
    return LossSum(term.sum * factor, term.weight * factor)


def is_fixed(weight: Any) -> bool:
    """Returns whether this is the weight of a loss with ``reduction="sum"``: it is not added."""
    return hasattr(weight, _FIXED)


def global_mean(loss_sum: LossSum) -> Any:
    """Returns the loss of the global batch for logs, divided once after an all-reduce.

    Args:
        loss_sum: The sum and weight of this replica's shard.

    Returns:
        A float scalar, the same on every replica; 0 if the total weight is 0.

    Raises:
        LossError: Called outside ``strategy.run`` under a strategy of several replicas, or
            differentiated on several replicas.

    Example:
        >>> import tfmultigpu as tmg
        >>> float(tmg.global_mean(tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])))
        2.0
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise LossError(
            "global_mean adds over replicas, so it must be called by each of them. Call it inside "
            "the function given to strategy.run."
        )

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def mean(shard_sum: Any, shard_weight: Any) -> Any:
        total, weight = context.all_reduce(tf.distribute.ReduceOp.SUM, [shard_sum, shard_weight])

        def gradient(upstream: Any) -> Any:
            if context.num_replicas_in_sync > 1:
                raise LossError(
                    "global_mean is for logs. Received: its gradient on several replicas. That is "
                    "each replica's part of the gradient alone, so clipping and loss scaling would "
                    f"decide on parts. {BY_HAND}"
                )
            return tf.math.divide_no_nan(upstream, weight), tf.zeros_like(weight)

        return tf.math.divide_no_nan(total, weight), gradient

    return mean(tf.convert_to_tensor(loss_sum.sum), tf.convert_to_tensor(loss_sum.weight))


def loss_term(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> LossTerm:
    """Returns the loss of one shard, of a result of ``as_loss``, as a term; see ``loss_sum``."""
    import keras

    unreduced: list[Any] = []
    values_of = _elementwise(loss, unreduced)
    couples = isinstance(loss, getattr(keras.losses, "Circle", ()))
    if not couples and _may_mix_axes(loss, y_true, y_pred, sample_weight):
        tensors = (y_true, y_pred, sample_weight)
        check_row_axes(loss.name, _elementwise(loss, []), tensors, throughout=_is_from_keras(loss))
    values = values_of(y_true, y_pred, sample_weight)
    # A loss may mask its values itself (ignore_class); the weighted values have lost that mask, and
    # may have got back the rows that the loss has reduced.
    plain = tf.convert_to_tensor(unreduced[0]) if unreduced else values
    if couples or values.shape.rank == 0 or not _has_rows(plain, y_pred):
        raise LossError(_no_rows(loss, plain, y_pred))
    total = tf.reduce_sum(values)
    if loss.reduction == "sum":
        return LossTerm(total, tf.ones_like(total), fixed=True)
    mask = _mask(y_pred, unreduced[0] if unreduced else values)
    weighted = sample_weight is not None or mask is not None
    if loss.reduction == "mean_with_sample_weight" and weighted:
        if mask is None and not _weighs_rows(sample_weight, values):
            raise LossError(
                "mean_with_sample_weight divides by the sum of the weights, so each row needs its "
                f"own. Received: weights {sample_weight!r} for losses of shape "
                f"{tuple(values.shape)}. Write sample_weight=tf.fill(tf.shape(y_pred)[:1], weight)."
            )
        return LossTerm(total, _sum_of_weights(sample_weight, mask, total.dtype))
    elements = tf.cast(tf.size(values), total.dtype)
    if mask is not None:
        valid = tf.cast(tf.math.count_nonzero(mask), total.dtype)
        masked = tf.cast(tf.size(mask), total.dtype)  # 0 in a shard without rows.
        return LossTerm(total, tf.math.divide_no_nan(valid * elements, masked))
    # A function may merge, drop or add rows; the losses of Keras return one entry per row.
    per_row = values.shape[1:].num_elements() if _is_from_keras(loss) else None
    return LossTerm(total, elements, float(per_row) if per_row else None)


def _no_rows(loss: Any, values: Any, y_pred: Any) -> str:
    """Returns the error for a loss that does not return one value per row."""
    flat = _shape(y_pred).rank == 1
    hint = " Or give both a last axis: y_true[:, None] and y_pred[:, None]." if flat else ""
    return (
        f"The loss {loss.name!r} is one number for a batch, or couples the examples of a batch, so "
        f"it depends on how the batch was cut. Received: shape {tuple(values.shape)} from "
        f"{type(loss).__name__}. Return one value per example: tf.reduce_mean(tf.square(y_true - "
        "y_pred), axis=-1). A loss that needs all examples (Dice over a batch, Circle) gets them "
        "by tmg.gather_rows(y_pred), and returns values of this replica's rows, or the one number "
        f"for each row: tf.fill(tf.shape(y_pred)[:1], value).{hint}"
    )


def _elementwise(loss: Any, unreduced: list[Any]) -> Any:
    """Returns a loss that returns its weighted values, and appends the plain ones to a list."""

    def call(y_true: Any, y_pred: Any) -> Any:
        unreduced.append(loss.call(y_true, y_pred))
        return unreduced[-1]

    # copy.copy would serialise the Keras object, which fails for many user-defined losses.
    elementwise = object.__new__(type(loss))
    vars(elementwise).update(vars(loss))
    elementwise.reduction = "none"
    elementwise.call = call
    return elementwise


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def as_loss(loss: Any) -> Any:
    """Returns a loss, its name or a function of per-example values as a ``keras.losses.Loss``."""
    import keras

    known = loss
    if isinstance(loss, str):
        with suppress(ValueError):  # An unknown name stays a string.
            known = keras.losses.get(loss)
    if known is getattr(keras.losses, "circle", None):
        return keras.losses.Circle()
    if isinstance(known, keras.losses.Loss):
        return known
    if isinstance(known, str | type) or not callable(known):
        raise LossError(
            f"This is not a loss, or a name that Keras does not know. Received: loss={loss!r}. "
            "Give a name such as 'mse', an object such as keras.losses.MeanSquaredError(), or a "
            "function f(y_true, y_pred) that returns one value per example."
        )
    return _function_loss(known)


def _may_mix_axes(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> bool:
    """Returns whether something may broadcast along rows; Keras losses of equal ranks do not."""
    shapes = [getattr(one, "shape", ()) for one in tf.nest.flatten([y_true, y_pred])]
    ranks = {tf.TensorShape(shape).rank for shape in shapes}
    return sample_weight is not None or len(ranks) > 1 or not _is_from_keras(loss)


def _shape(value: Any) -> tf.TensorShape:
    return tf.TensorShape(getattr(value, "shape", None))  # type: ignore[arg-type]


def _has_rows(values: tf.Tensor, y_pred: Any) -> bool:
    """Returns whether there is a value per row: not one, nor a fixed number for any rows."""
    shape = _shape(y_pred)
    if not shape.rank or not values.shape.rank:
        return values.shape.rank != 0
    if shape[0] is None:
        return values.shape[0] is None
    # A function may drop all rows but one; else the shape of a row is that of a sum over rows.
    left = values.shape.as_list()
    one_left = tf.executing_eagerly() and left == [1]
    return shape[0] in (0, 1, left[0]) or one_left or left != shape.as_list()[1:]


def _weighs_rows(sample_weight: Any, values: Any) -> bool:
    """Returns whether weights do not broadcast along the rows."""
    weight, values = _same_rank(tf.convert_to_tensor(sample_weight), values)
    if None in (weight.shape.rank, values.shape.rank):
        return True
    alike = weight.shape.rank == values.shape.rank
    return alike and bool(weight.shape[0] != 1 or values.shape[0] == 1)


def _is_from_keras(loss: Any) -> bool:
    return _compat.is_part_of_keras(getattr(loss, "wrapped", type(loss)))


def _function_loss(function: Callable[[Any, Any], Any]) -> Any:
    import keras

    class FunctionLoss(keras.losses.Loss):  # type: ignore[misc]
        """Function of per-example values; its arguments get the same rank, as in Keras."""

        wrapped = staticmethod(function)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            if not tf.nest.is_nested(y_true) and not tf.nest.is_nested(y_pred):
                y_true, y_pred = _same_rank(y_true, y_pred)
            return function(y_true, y_pred)

    name = getattr(function, "__name__", type(function).__name__)
    return FunctionLoss(name=re.sub(r"\W", "", name))  # Keras opens a scope of this name.


def _same_rank(first: Any, second: Any) -> tuple[Any, Any]:
    """Adds or removes a last axis of size 1 if the ranks differ by one, as Keras does."""
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
    """Returns the mask that Keras losses apply: of the predictions and of the losses."""
    masks = [_compat.keras_mask(y_pred), _compat.keras_mask(values)]
    present = [tf.cast(mask, tf.bool) for mask in masks if mask is not None]
    return functools.reduce(tf.logical_and, present) if present else None


def _sum_of_weights(sample_weight: Any, mask: Any, dtype: tf.DType) -> Any:
    if sample_weight is None:
        return tf.cast(tf.math.count_nonzero(mask), dtype)
    weight = tf.cast(sample_weight, dtype)
    if mask is None:
        return tf.reduce_sum(weight)
    kept, weight = _same_rank(tf.cast(mask, dtype), weight)
    return tf.reduce_sum(weight * kept)
