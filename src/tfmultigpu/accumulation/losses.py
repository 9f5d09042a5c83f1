"""Losses as sums over examples, and the weights that divide them after the last addition."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.gradients import BY_HAND
from tfmultigpu.accumulation.shown import shown
from tfmultigpu.arguments import check_callable
from tfmultigpu.data.batch_format import cast_all
from tfmultigpu.data.graph_messages import GraphMessage
from tfmultigpu.errors import LossError, ReplicaDependenceWarning
from tfmultigpu.lists import present
from tfmultigpu.strategies.scopes import refuse_legacy_keras
from tfmultigpu.types import Function, Nested, Scalar, Tensor
from tfmultigpu.user_code import warn

rows_of_step: ContextVar[Any] = ContextVar("rows_of_step", default=None)  # On this replica.
# Attributes of tensors, as Keras' mask is one.
_FIXED, _USE, _SUM = "_tfmultigpu_fixed", "_tfmultigpu_use", "_tfmultigpu_sum"
_LOSS = "def loss(y_true, y_pred), which returns one value per example; or a name, loss='mse'."
_CROSSENTROPY = "crossentropy", "ce"  # The shapes of a batch tell which of three it is.
_OTHER_ROWS = GraphMessage(
    "The loss did not return one value per row: the model or the loss merges, drops or adds rows.",
    "values, and values of so many rows {}",
    "Give it as a function, whose values are counted: lambda y_true, y_pred: loss(y_true, y_pred).",
)
# The scope of the operation that fails then, and what TensorFlow says of it.
_SCOPE = "the_loss_has_one_value_per_row"
_OTHER_SHAPE = re.compile(r"tensor with (\d+) values, but the requested shape has (\d+)")


class LossSum(NamedTuple):
    """The loss of one shard, not yet divided.

    Attributes:
        sum: Sum of the weighted losses of the shard's elements, a float scalar.
        weight: The shard's part of the divisor, a float scalar: the number of elements, or the sum
            of their weights. It may not depend on trained variables.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.LossSum(sum=6.0, weight=3.0)  # A ``forward`` may return this.
        LossSum(sum=6, weight=3)
    """

    sum: Tensor
    weight: Scalar

    def __repr__(self) -> str:
        """Returns both numbers; inside a ``tf.function``, where there are none, their types."""
        return f"LossSum(sum={shown(self.sum)}, weight={shown(self.weight)})"


class FixedLossSum(LossSum):
    """Loss with ``reduction="sum"``, whose weight is 1 in total, however often it is added."""

    def __new__(cls, sum: Tensor, weight: Scalar) -> FixedLossSum:
        """Notes it on the weight; a ``tf.function`` that returns the pair keeps the class alone."""
        with suppress(AttributeError):  # ``tf.nest`` makes pairs of specs and numbers, too.
            setattr(weight, _FIXED, True)
        return super().__new__(cls, sum, weight)


def is_fixed(pair_or_weight: LossSum | Scalar) -> bool:
    """Returns whether a pair, or the weight of one, is of ``reduction="sum"``: it is not added."""
    if isinstance(pair_or_weight, FixedLossSum):
        return True
    if isinstance(pair_or_weight, LossSum):
        return hasattr(pair_or_weight.weight, _FIXED)
    return hasattr(pair_or_weight, _FIXED)


class Use:
    """What was done with a pair of ``loss_sum``, or with the sum of one.

    Attributes:
        differentiated: Whether the gradient of the sum was taken; True also if not known.
        scaled: Whether a loss scale multiplied it.
        scale: The value of that scale, a float32 scalar.
        undone: Whether a gradient was multiplied by the divisor, if there is one.
    """

    scale: Scalar = None
    _divisor: Scalar = None
    _total: Tensor = None
    _upstream: Tensor = None

    def __init__(self, *, differentiated: bool = True) -> None:
        self.differentiated = differentiated
        self.scaled = self.undone = False

    @property
    def lost(self) -> bool:
        """True if a gradient was divided, and nothing has multiplied it again."""
        return self._divisor is not None and self.differentiated and not self.undone

    def differentiate(self, total: Tensor, upstream: Tensor) -> None:
        """Notes that the gradient of the sum was taken, and what it was multiplied by."""
        self.differentiated, self._total, self._upstream = True, total, upstream

    def is_of_sum(self, weight: Scalar) -> bool:
        """Returns whether the sum was differentiated, and was not divided by its rows before."""
        if self.scaled or self._upstream is None:
            return self.differentiated
        if tf.is_symbolic_tensor(self._upstream):
            return not _depends_on_rows(self._upstream, self._total)
        rows = float(weight)
        return rows <= 1 or abs(float(self._upstream) * rows - 1) > 1e-5

    def scale_by(self, scale: Scalar) -> None:
        """Notes that a loss scale of this value multiplies the sum."""
        self.scaled, self.scale = True, scale
        _unclaimed.uses.append((self, tf.compat.v1.get_default_graph()))

    def divide(self, divisor: Scalar) -> None:
        """Keeps what makes the sum as small as a mean: of one replica and one batch."""
        self._divisor, self.undone = divisor, False

    def undo(self, gradient: Tensor) -> Tensor:
        """Returns a gradient of at least float32 times the divisor."""
        self.undone = True
        if self._divisor is None:
            return gradient
        return gradient * tf.cast(self._divisor, gradient.dtype)


class _Unclaimed(threading.local):
    """Scaled losses of this thread, with their graphs, until an ``add`` gets the gradients."""

    def __init__(self) -> None:
        self.uses: deque[tuple[Use, Any]] = deque(maxlen=8)


_unclaimed = _Unclaimed()


def claim(use: Use | None) -> list[Scalar]:
    """Returns the scales of losses whose gradients may come with no pair, or with a new one.

    Args:
        use: The use of the pair that comes with them; None if it is not known. A ``tf.function``
            that returns a pair makes another one of it.

    Returns:
        For each loss the value of its scale; None for one that only a function inside can read.
    """
    if use is not None:
        for noted in [noted for noted in _unclaimed.uses if noted[0] is use]:
            _unclaimed.uses.remove(noted)
        return []
    here = tf.compat.v1.get_default_graph()
    scales: list[Scalar] = []
    for other, graph in _unclaimed.uses:
        scale = other.scale if graph is here else None
        while graph is not None and graph is not here:
            graph = getattr(graph, "outer_graph", None)
        if graph is here:
            scales.append(scale)
    _unclaimed.uses.clear()
    return scales


def _depends_on_rows(factor: Tensor, total: Tensor) -> bool:
    """Returns whether a scalar in a graph is computed from the shape of a tensor."""
    waiting, known = [factor], {id(total.op)}
    while waiting:
        operation = waiting.pop().op
        # A shape that is known while it is traced is a constant, of which an element is taken.
        if operation.type in ("Shape", "ShapeN", "Size", "StridedSlice"):
            return True
        if id(operation) not in known:
            known.add(id(operation))
            waiting += operation.inputs
    return False


def is_sum(weight: Scalar) -> bool:
    """Returns whether this is the sum of a pair, which is given in place of its weight."""
    return hasattr(weight, _SUM)


def note_use(pair: LossSum, use: Use) -> None:
    """Notes the use of a pair on its sum and on its weight, which may travel alone."""
    with suppress(AttributeError):
        setattr(pair.sum, _SUM, True)
    for part in pair:
        with suppress(AttributeError):  # A number is not a tensor.
            setattr(part, _USE, use)


def use_of(pair_or_part: LossSum | Scalar) -> Use | None:
    """Returns the use of a pair, or of a part of one; None if it is not known."""
    # Several pairs may have one weight, so the sum decides where it is known.
    if isinstance(pair_or_part, LossSum):
        pair_or_part = pair_or_part.sum
    return getattr(pair_or_part, _USE, None)


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """Additive part of a step's loss on one shard."""

    sum: Tensor
    weight: Scalar  # What divides the sum, after both were added over all shards.
    per_row: float | None = None  # The weight of a row, if that is a constant.
    fixed: bool = False  # Whether the weight is that of each shard, and is not added.
    name: str | None = None  # The output.
    factor: float = 1.0  # The loss weight of the output.
    added: bool = False  # Whether a layer added it, by ``add_loss``.
    whole: bool = False  # Whether it is of a ``compute_loss``: nothing is to be added to it.
    reads_weights: bool = True  # Whether the sample weights of the batch, if any, reach it.


def loss_sum(
    loss: Any,
    y_true: Nested,
    y_pred: Nested,
    sample_weight: Nested = None,
    *,
    row_weight: Scalar = None,
) -> LossSum:
    """Returns the loss of one shard as a sum and a weight, two scalars of at least float32.

    Follows Keras' reductions and masks: the weight is the number of unmasked elements, the sum of
    the sample weights for ``"mean_with_sample_weight"``, and 1 over all replicas for ``"sum"``.

    Args:
        loss: A Keras loss, its name, or a function ``f(y_true, y_pred)`` of one value per example
            or per element.
        y_true: Labels, shape ``[rows, ...]``.
        y_pred: Predictions, shape ``[rows, ...]``.
        sample_weight: Weights that broadcast to the losses, shape ``[rows]`` or ``[rows, ...]``.
        row_weight: The weight of each row, a scalar. For a batch of
            ``distribute_dataset(..., small_batches="copy")`` a replica gives its part of
            ``tmg.data.row_weight(batch, strategy)``. None: 1.

    Raises:
        LossError: The loss returns one number for the whole shard, or values without an axis of
            rows.
        ValueError: Keras does not know the loss.

    Example:
        >>> import tfmultigpu as tmg
        >>> s, w = tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])
        >>> float(s), float(w)
        (4.0, 2.0)
    """
    term = loss_term(as_loss(loss), y_true, y_pred, sample_weight)
    if row_weight is None:
        row_weight = 1.0
    factor: Scalar = tf.cast(row_weight, term.sum.dtype)
    total = term.sum * tf.ensure_shape(factor, [])
    replicas = getattr(tf.distribute.get_replica_context(), "num_replicas_in_sync", 1)
    rows = rows_of_step.get()
    if term.fixed:  # These add up to 1, also for who does not know the mark.
        factor = 1.0 / replicas if rows is None else tf.cast(rows.share(replicas), factor.dtype)
    weight = term.weight * factor
    kind = FixedLossSum if term.fixed else LossSum
    if rows is not None:  # A step checks its weights and results by itself.
        return kind(total, weight)
    watched = replicas > 1 or not tf.inside_function()  # TensorFlow keeps a watched graph for good.
    use = Use(differentiated=not watched)
    if replicas > 1:
        weight = _without_gradient(weight, total, _warn_of_means)
    if watched:
        total = _noting_gradient(total, use)
    pair = kind(total, weight)
    note_use(pair, use)
    return pair


def _without_gradient(value: Scalar, loss: Tensor, refuse: Callable[[], None]) -> Tensor:
    """Returns a number that a loss computed; taking its gradient calls ``refuse`` at that line."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(value: Scalar, _: object) -> Tensor:
        # Not a function in this one: AutoGraph copies those, and hides whose line asks for it.
        return tf.identity(value), functools.partial(_no_gradient, refuse)

    return identity(value, loss)


def _no_gradient(refuse: Callable[[], None], _: object) -> tuple[None, None]:
    refuse()
    return None, None


def _noting_gradient(total: Tensor, use: Use) -> Tensor:
    """Returns a sum; taking its gradient notes that."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(value: Tensor) -> Tensor:
        def gradient(upstream: Tensor) -> Tensor:
            use.differentiate(noted, upstream)
            return upstream

        noted = tf.identity(value)
        return noted, gradient

    return identity(total)


def _warn_of_means() -> None:
    warn(
        "pair.weight divides after all replicas were added. Received: the gradient of "
        "pair.weight. pair.sum / pair.weight is a mean over one replica's rows: it is right for "
        f"logs, but trains on a mean of means. {BY_HAND} To divide by the weight of all replicas, "
        "write tf.stop_gradient(context.all_reduce('SUM', pair.weight)).",
        ReplicaDependenceWarning,
    )


def _refuse_global_mean() -> None:
    raise LossError(
        "global_mean is for logs. Each replica has only a part of its gradient, which an optimizer "
        "would clip and scale by itself.",
        "the gradient of global_mean",
        BY_HAND,
    )


def global_mean(loss_sum: LossSum) -> Scalar:
    """Returns the loss of the global batch for logs, a scalar; 0 if the weight is 0.

    Args:
        loss_sum: The pair of this replica's shard.

    Raises:
        LossError: It is called outside of the replicas, or differentiated on several.

    Example:
        >>> import tfmultigpu as tmg
        >>> float(tmg.accumulation.global_mean(tmg.loss_sum("mse", [[1.0], [2.0]], [[1.0], [4.0]])))
        2.0
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        raise LossError("global_mean is for each replica: call it inside strategy.run.")
    total, weight = context.all_reduce("SUM", list(map(tf.convert_to_tensor, loss_sum)))
    mean = tf.math.divide_no_nan(total, weight)
    if context.num_replicas_in_sync == 1:
        return mean
    return _without_gradient(mean, total, _refuse_global_mean)


def loss_term(
    loss: Any,
    y_true: Nested,
    y_pred: Nested,
    sample_weight: Nested,
    rows: Scalar = None,
) -> LossTerm:
    """Returns the loss of one shard, of a result of ``as_loss``, as a term; see ``loss_sum``.

    Args:
        loss: The loss; this and all that follows as for ``loss_sum``.
        y_true: Labels.
        y_pred: Predictions.
        sample_weight: Weights.
        rows: The rows of the shard, an int64 scalar, if they are to divide: a weight that follows
            from the rows is then held to them. None: the weight alone divides.
    """
    unreduced: list[Tensor] = []

    def checked(values: Tensor) -> Tensor:
        _check_values(loss, values, y_true, y_pred, sample_weight)
        unreduced.append(values)
        return values

    # copy.copy would serialise the Keras object, which fails for many user-defined losses.
    elementwise = object.__new__(type(loss))
    call = lambda *args: checked(loss.call(*args))  # noqa: E731
    vars(elementwise).update(vars(loss), reduction="none", call=call)
    values = elementwise(y_true, y_pred, sample_weight)
    if not unreduced:  # It has a ``__call__`` of its own.
        checked(values)
    # A function may merge, drop or add rows; the losses of Keras return one entry per row.
    sources = type(loss), getattr(loss, "fn", type(loss))
    per_row = values.shape[1:].num_elements() if all(map(_compat.is_part_of_keras, sources)) else 0
    # Those that Keras applies: of the predictions and of the losses.
    masks = cast_all(present(map(_compat.keras_mask, (y_pred, unreduced[0]))), tf.bool)
    weighs = loss.reduction == "mean_with_sample_weight" and (masks or sample_weight is not None)
    is_counted = bool(per_row) and loss.reduction != "sum" and not masks and not weighs
    if is_counted and rows is not None:
        values = _one_for_each_row(values, rows, int(per_row or 0))
    total = tf.reduce_sum(values)
    if loss.reduction == "sum":
        return LossTerm(total, tf.ones_like(total), fixed=True)
    mask = None
    if masks:
        mask = functools.reduce(tf.logical_and, masks)
    parts = cast_all(present([mask, sample_weight]), total.dtype)
    if weighs:
        if len(parts) == 2:
            parts = list(_same_rank(*parts))
        return LossTerm(total, tf.reduce_sum(functools.reduce(operator.mul, parts)))
    elements = tf.cast(tf.size(values), total.dtype)
    if mask is not None:
        valid = tf.math.count_nonzero(mask, dtype=total.dtype) * elements
        # The size is 0 in a shard without rows.
        return LossTerm(total, tf.math.divide_no_nan(valid, tf.cast(tf.size(mask), total.dtype)))
    return LossTerm(total, elements, float(per_row or 0) if is_counted else None)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _check_values(
    loss: Any, values: Tensor, y_true: Nested, y_pred: Nested, sample_weight: Nested
) -> None:
    """Checks that a loss returned one value per row or more, and that weights belong to rows."""
    import keras

    if isinstance(values, tf.RaggedTensor):
        raise LossError(
            "The values of a loss are a dense tensor.",
            f"a RaggedTensor from {loss.name!r}",
            "Return one value per example: tf.reduce_mean(values, axis=-1).",
        )
    values = tf.convert_to_tensor(values)
    if values.shape.rank is None:
        raise LossError(
            f"The values of the loss {loss.name!r} have an unknown number of axes.",
            f"labels of shape {_shape(y_true)} and predictions of shape {_shape(y_pred)}",
            "The usual cause is tf.squeeze(x), which would drop the axis of rows in a batch of "
            "one row. Name the axis: tf.squeeze(x, axis=-1).",
        )
    couples = getattr(loss, "fn", None) is keras.losses.circle
    if couples or not _has_rows(values.shape, _shape(y_pred)):
        raise LossError(
            f"The loss {loss.name!r} is one number for a batch, or couples the examples of a "
            "batch, so it depends on how the batch was cut.",
            f"shape {tuple(values.shape)} from {type(loss).__name__}",
            "Return one value per example: tf.reduce_mean(tf.square(y_true - y_pred), axis=-1). A "
            "mean over what a mask leaves is a sum and a weight: forward=f returns "
            "tmg.LossSum(tf.reduce_sum(values * mask), tf.reduce_sum(mask)); or "
            "sample_weight=mask with reduction='mean_with_sample_weight'. A loss that needs all "
            "examples (Dice over a batch, Circle) gets them by tmg.gather_rows(y_pred), and "
            "returns the one number for each row: tf.fill(tf.shape(y_pred)[:1], value); see "
            "docs/coupled-losses.md. Predictions of shape [rows] need an axis: y_true[:, None] "
            "and y_pred[:, None].",
        )
    axes: list[int | None] = []
    for tensor in tf.nest.flatten([y_true, y_pred]):
        axes += (_shape(tensor) or [None])[1:]
    if None in values.shape[1:] and None not in axes:
        raise LossError(
            f"The loss {loss.name!r} pairs each row with every row.",
            f"losses of shape {tuple(values.shape)}",
            "Give labels and predictions as many axes: y_true[:, None].",
        )
    if sample_weight is None:
        return
    weights, values = _same_rank(tf.convert_to_tensor(sample_weight), values)
    divides = loss.reduction == "mean_with_sample_weight"
    if weights.shape.rank == values.shape.rank:
        fits = not divides or weights.shape[0] != 1 or values.shape[0] == 1
    else:
        fits = not divides and weights.shape.rank == 0
    if not fits:
        raise LossError(
            "sample_weight has a weight for each row and all axes of the losses, of length 1 to "
            "broadcast.",
            f"weights of shape {tuple(weights.shape)} for losses of shape {tuple(values.shape)}",
            "Write sample_weight[:, None] for an axis more, or for one weight of all rows "
            "tf.fill(tf.shape(y_pred)[:1], weight).",
        )


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def as_loss(loss: Any) -> Any:
    """Returns a loss, its name or a function of per-example values as a ``keras.losses.Loss``."""
    import keras

    refuse_legacy_keras(loss)
    if isinstance(loss, str) and loss.lower() in _CROSSENTROPY:
        return _loss_by_shapes()(name=loss)
    known = keras.losses.get(loss)
    if isinstance(known, keras.losses.Loss):
        return known
    check_callable("loss", known, "y_true", "y_pred", write=_LOSS)
    name = re.sub(r"\W", "", getattr(known, "__name__", type(known).__name__))
    # As ``compile`` does. Keras has no public name for this class, and opens a scope of the name.
    return keras.losses.MeanSquaredError.__base__(known, name=name)


def _shape(value: object) -> tf.TensorShape:
    return tf.TensorShape(getattr(value, "shape", None))  # type: ignore[arg-type]


def _has_rows(values: tf.TensorShape, predictions: tf.TensorShape) -> bool:
    """Returns whether there is a value per row: not one, nor a fixed number for any rows."""
    if not predictions.rank or not values.rank:
        return values.rank != 0
    # A function may drop rows; but the shape of a row is that of a sum over rows.
    some = predictions[0] is not None and values.as_list() != predictions.as_list()[1:]
    return some or predictions[0] in (0, 1, values[0])


def _same_rank(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Adds or removes a last axis of size 1 if the ranks differ by one, as Keras does."""
    if first.shape.rank < second.shape.rank:
        second, first = _same_rank(second, first)
    elif first.shape.rank == second.shape.rank + 1 and first.shape[-1] == 1:
        if second.shape.rank == 1:
            return first, second[..., None]
        return tf.squeeze(first, -1), second
    return first, second


@functools.cache
def _loss_by_shapes() -> type[Any]:
    """Returns the class of the loss that ``model.compile`` chooses for ``_CROSSENTROPY``.

    Keras knows the name in ``compile`` alone, where it has the labels and the predictions.
    """
    from keras import losses

    class Crossentropy(losses.Loss):  # type: ignore[misc]
        """The binary, sparse categorical or categorical crossentropy."""

        def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
            are_numbers = len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1
            chosen: Function = losses.categorical_crossentropy
            if y_pred.shape[-1] == 1:
                chosen = losses.binary_crossentropy
            elif are_numbers:
                chosen = losses.sparse_categorical_crossentropy
            # Keras' wrapper of a function, which brings labels and predictions to one rank.
            return losses.MeanSquaredError.__base__(chosen, name=self.name).call(y_true, y_pred)

    return Crossentropy


def _one_for_each_row(values: Tensor, rows: Scalar, per_row: int) -> Tensor:
    """Returns the values of a loss, held to their number: as many for each row as a row has.

    It is known from shapes alone, so nothing has to wait for the values. XLA compares it too, which
    leaves out assertions.
    """
    found, known = values.shape.num_elements(), tf.get_static_value(rows)
    if found is not None and known is not None:
        if found != known * per_row:
            raise _OTHER_ROWS.as_error(LossError, f"{_OTHER_ROWS.text} [{found} {known * per_row}]")
        return values
    # Of one axis more: TensorFlow's optimizer takes a reshape away that keeps the known shape.
    shape = [tf.cast(rows, tf.int32), *values.shape[1:], 1]
    with tf.name_scope(_SCOPE):
        return tf.reshape(values, shape)


def as_rows_error(message: str) -> LossError | None:
    """Returns what TensorFlow's error says of ``_one_for_each_row``; None if it is of others."""
    numbers = _OTHER_SHAPE.search(message)
    if _SCOPE not in message or numbers is None:
        return None
    return _OTHER_ROWS.as_error(LossError, f"{_OTHER_ROWS.text} [{' '.join(numbers.groups())}]")
