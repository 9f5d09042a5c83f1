"""Adding gradients over micro-batches, without communication until the sum is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import (
    check_gradients,
    check_reduced,
    clip_gradients,
    global_norm,
    refuse_float8,
    sum_dtype,
    warn_of_clipped_part,
    warn_of_variables,
)
from tfmultigpu.accumulation.loss_scale import LossScale
from tfmultigpu.accumulation.losses import LossSum, claim, is_fixed, is_sum, use_of
from tfmultigpu.accumulation.stages import (
    CARRYING,
    REDUCED_BY_SCALED,
    Reduced,
    Stage,
    check_one_scale,
)
from tfmultigpu.accumulation.table_rows import is_table
from tfmultigpu.accumulation.update import apply_reduced_gradients
from tfmultigpu.arguments import brief, check_positive
from tfmultigpu.errors import ReplicaDependenceWarning, ScopeError, TfMultiGpuError
from tfmultigpu.lists import pick
from tfmultigpu.strategies.collectives import adds_lists, sum_over_replicas
from tfmultigpu.strategies.row_lists import (
    as_tensor,
    is_list,
    joined,
    row_list,
    unique,
    values_of,
    with_values,
)
from tfmultigpu.strategies.scopes import check_scope, current_strategy, refuse_legacy_keras
from tfmultigpu.strategies.topology import describe, tf_variable
from tfmultigpu.types import KerasOptimizer, KerasVariable, Scalar, Tensor
from tfmultigpu.user_code import warn

_SMALL = 2.0**-64  # A sum of scales of float32 fits into it then.


class GradientAccumulator:
    """Adds gradients and weights on each replica, and over the replicas once per window.

    ``add`` takes gradients of loss *sums*, with the weights that divide them. ``apply`` updates by
    the gradient of the mean over the whole window, however short; ``reduce`` returns that gradient.
    Sums are kept in at least float32. Save checkpoints between windows, because TensorFlow spreads
    a restored sum evenly over the replicas.

    Attributes:
        variables: The variables that the gradients are for, in order.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> weight = keras.Variable([1.0])
        >>> window = tmg.GradientAccumulator([weight])
        >>> window.add([tf.constant([6.0])], weight=2.0)
        >>> window.add([tf.constant([3.0])], weight=1.0)
        >>> gradients, weight = window.reduce()
        >>> gradients[0].numpy().tolist(), float(weight)
        ([3.0], 3.0)
    """

    def __init__(self, variables: Sequence[KerasVariable]) -> None:
        """Creates the state of each replica; call it in ``strategy.scope()``."""
        refuse_legacy_keras(variables)
        self.variables = list(variables) if isinstance(variables, Iterable) else []
        if not self.variables:
            raise TfMultiGpuError(
                "GradientAccumulator needs the variables of a built model.",
                f"a {type(variables).__name__}, no variables",
                "Build the model, and give tmg.GradientAccumulator(model.trainable_variables).",
            )
        _check_entered(self.variables)
        self._strategy = current_strategy(None, "GradientAccumulator", self)
        check_scope(self.variables, self._strategy, "model")
        refuse_float8(self.variables)
        self._sums = [_sum_of(variable) for variable in self.variables]
        wide = tf.float64 in [total.dtype for total in self._sums]
        # The sum of the weights; how many were added of which each is 1 in total, of all, of scaled
        # losses, and of losses that no scale multiplied; the sum of the scales, times _SMALL.
        self._weights = _local_sum([6], tf.float64 if wide else tf.float32)
        self._count = _local_sum([], tf.int64, tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self._fixed: bool | None = None  # Whether the weights are those of ``reduction="sum"``.
        self._reached: set[int] = set()  # The numbers of variables with a gradient.
        self._scaled: set[bool | None] = set()  # Whether losses were scaled; None if not known.
        self._traced_in: weakref.ref[Any] | None = None  # The graph that last added.

    def __repr__(self) -> str:
        """Returns what it adds gradients of, where, and how many micro-batches it holds."""
        count, where = len(self.variables), describe(self._strategy)
        return f"<GradientAccumulator of {count} variable(s) on {where}: holds {self._held()}>"

    def _held(self) -> str:
        count = self.count
        if tf.is_tensor(count):
            return "what a tf.function adds"
        return f"{count} micro-batch(es)" if count else "nothing"

    @property
    def count(self) -> Any:
        """Micro-batches added since the last ``reduce``: an int, or a tensor inside a function."""
        count = tf.convert_to_tensor(self._count)
        return count if tf.inside_function() else int(count)

    def add(self, gradients: Sequence[Tensor], weight: Scalar = None) -> None:
        """Adds one micro-batch on this replica, without communication; replica context.

        Args:
            gradients: Gradients of the *sum* of losses, one per variable; None counts as zero.
            weight: The ``LossSum`` that was differentiated, by its ``sum`` or by ``scale_loss``; or
                its weight, a scalar, which will divide the sum.

        Raises:
            TypeError: The weight is missing.
            LossError: All gradients are None.
            TfMultiGpuError: The number of gradients is not the number of variables; the call is
                outside a replica; only some of the losses have ``reduction="sum"``, or a loss
                scale; or the window was created under another strategy.
        """
        is_scalar = not isinstance(weight, (str, Sequence)) or isinstance(weight, LossSum)
        if weight is None or not is_scalar or is_sum(weight):
            raise TypeError(
                "add needs the weight by which the sum of these losses is to be divided: replicas "
                "and micro-batches need not have the same. Received: "
                f"weight={'pair.sum' if is_sum(weight) else brief(weight)}. "
                "Write window.add(gradients, weight=pair) for gradients of pair.sum, with "
                "pair = tmg.loss_sum(loss, y, outputs); or give the number of rows in the sum."
            )
        if len(gradients) != len(self.variables):
            raise TfMultiGpuError(
                "add takes one gradient for each variable.",
                f"{len(gradients)} gradients for {len(self.variables)} variables",
                "Pass None for a variable without gradient.",
            )
        if self._context() is None:
            raise TfMultiGpuError("add is for each replica: call it inside strategy.run.")
        for variable, gradient in zip(self.variables, gradients, strict=True):
            shape = tf.TensorShape(variable.shape)  # gradients may be arrays
            if gradient is not None and not shape.is_compatible_with(gradient.shape):
                raise TfMultiGpuError(
                    "add takes the gradients in the order of its variables.",
                    f"shape {gradient.shape} for {variable.name!r} of shape {shape}",
                    "Write window.add(tape.gradient(pair.sum, window.variables), pair).",
                )
        check_gradients(self.variables, gradients)
        fixed, use = is_fixed(weight), use_of(weight)
        if self._fixed not in (None, fixed):
            raise TfMultiGpuError(
                "The losses of one window need one way to divide.",
                'a loss with reduction="sum" and another, both in one window, which divides '
                "by 1 or by the weight",
                "Create a window for each.",
            )
        self._fixed = fixed
        scaled, scale = (None, None) if use is None else (use.scaled, use.scale)
        if claimed := claim(use):
            scaled, scale = True, claimed[-1]
        self._note_scaled(scaled)
        if isinstance(weight, LossSum) and use is not None and not use.is_of_sum(weight.weight):
            warn(
                "add needs the gradients of the sum that belongs to the weight, which divides "
                "them. Received: a pair whose sum was not differentiated, or was divided by a "
                "number of rows first. Gradients of a mean would be divided twice. Write "
                "window.add(tape.gradient(pair.sum, variables), pair); for other gradients give "
                "the number that divides them.",
                ReplicaDependenceWarning,
            )

        for place, (total, gradient) in enumerate(zip(self._sums, gradients, strict=True)):
            if gradient is not None:
                self._reached.add(place)
                warn_of_clipped_part(gradient)
                total.add(gradient, _same if use is None else use.undo)

        divisor = weight.weight if isinstance(weight, LossSum) else weight
        divisor = tf.cast(divisor, self._weights.dtype)
        counts = [1.0, float(scaled is True), float(scaled is False)]
        after = []
        if scale is None:
            scale = tf.zeros([], divisor.dtype)
        else:
            scale = _SMALL * tf.cast(scale, divisor.dtype)
            held = tf.convert_to_tensor(self._weights)
            after = check_one_scale((held[3] > 0) & (held[5] != held[3] * scale))
        with tf.control_dependencies(after):
            self._weights.assign_add([*([0.0, 1.0] if fixed else [divisor, 0.0]), *counts, scale])
            self._count.assign_add(1)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(
        self,
        optimizer: KerasOptimizer,
        *,
        scale: LossScale | None = None,
        clip_norm: float | None = None,
    ) -> tuple[Scalar, Scalar]:
        """Updates the variables once, outside of ``strategy.run``; empties the window.

        It calls in the order that is right: ``reduce``, ``scale.unscale``, ``clip_gradients``,
        ``apply_reduced_gradients``, ``scale.update``.

        Args:
            optimizer: A Keras optimizer. If it is not built, it is built for these variables.
            scale: The loss scale, if ``scale.scale_loss`` multiplied the losses. An update whose
                gradient is not finite is then skipped: weights, slots and counters stay.
            clip_norm: The largest norm of the gradient of the window; None clips nothing.

        Returns:
            The norm of the gradient before clipping, a scalar; and whether there was an update, a
            bool scalar.

        Raises:
            TfMultiGpuError: The call is inside ``strategy.run``; nothing was added (inside a
                ``tf.function`` an ``InvalidArgumentError`` of TensorFlow with the same text); the
                losses carry a scale and ``scale`` is None, or the other way round; or the
                optimizer is a ``LossScaleOptimizer`` and ``scale`` is None.
            ScopeError: The optimizer was created outside the scope of the strategy.
            ValueError: ``clip_norm`` is not a positive, finite number.
            TypeError: ``scale`` is not a ``LossScale``.
        """
        if self._context() is not None:
            check_reduced("apply")
        if clip_norm is not None:
            clip_norm = check_positive(
                "clip_norm", clip_norm, "To clip nothing, leave clip_norm out."
            )
        if scale is not None and not isinstance(scale, LossScale):
            raise TypeError(
                f"scale is a tmg.LossScale. Received: {brief(scale)}. Write in strategy.scope(): "
                "scale = tmg.LossScale(); in the replica: target = scale.scale_loss(pair); and "
                "outside: window.apply(optimizer, scale=scale)."
            )
        gradients: list[Tensor] = self.reduce()[0]
        where = None
        if scale is not None:
            gradients, where = scale.unscale(gradients)
        if clip_norm is None:
            norm = global_norm(gradients)
        else:
            gradients, norm = clip_gradients(gradients, clip_norm)
            if where is not None:  # Clipping by a norm that overflows would make it NaN.
                where &= tf.math.is_finite(norm)
        apply_reduced_gradients(optimizer, gradients, self.variables, where=where)
        if scale is None:
            return norm, tf.constant(True)
        scale.update(where)
        return norm, where

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def reduce(self) -> Reduced:
        """Adds over the replicas, once, outside of ``strategy.run``; empties the window.

        Returns:
            The gradients, divided by the weight (0 if the weight is 0), and the weight of the
            window, a scalar of at least float32. Gradients have the variables' dtypes; for float16
            they are float32, because float16 may not hold them before ``unscale``. If only lists
            were added for a large table, its gradient is a list of unique rows, a
            ``tf.IndexedSlices``. ``unscale``, ``clip_gradients`` and ``apply_reduced_gradients``
            know these tensors, and refuse a wrong order.

        Raises:
            TfMultiGpuError: The call is inside ``strategy.run``, or the window was created
                under another strategy.
        """
        if self._context() is not None:
            check_reduced("reduce")
        if self._reached:
            left = set(range(len(self.variables))) - self._reached
            warn_of_variables(self.variables, pick(self.variables, sorted(left)))
        local = self._strategy.experimental_local_results
        # One list of sums for each replica, and at its end the weights.
        parts: list[list[Tensor]] = [[] for _ in local(self._weights)]
        for state in [*self._sums, _Dense(self._weights)]:
            for part, read in zip(parts, state.read(self._strategy), strict=True):
                part.append(read)
        totals = sum_over_replicas(self._strategy, parts)
        with tf.control_dependencies(tf.nest.flatten(parts, expand_composites=True)):
            for state in [*self._sums, _Dense(self._weights), _Dense(self._count)]:
                state.reset(self._strategy)
        *sums, weights = totals[0]
        weight, fixed, count, scaled_adds, plain_adds, scales = tf.unstack(weights, num=6)
        weight = tf.where(fixed > 0, tf.ones_like(weight), weight)
        gradients = []
        for total, variable in zip(sums, self.variables, strict=True):
            with tf.device(total.device):
                rows = unique(total) if is_list(total) else total
                values = values_of(rows)
                mean = tf.math.divide_no_nan(values, tf.cast(weight, values.dtype))
                is_float16 = tf.as_dtype(variable.dtype) == tf.float16
                mean = mean if is_float16 else tf.cast(mean, variable.dtype)
                gradients.append(with_values(rows, mean, variable.shape))
        scaled = None
        if True in self._scaled or self._scaled == {False}:
            scaled = True in self._scaled
        reduced = REDUCED_BY_SCALED[scaled](gradients, weight)
        # A compiled ``add`` is traced once: of later windows the counts alone know it. What is
        # known while a function is traced is an error there, and not of TensorFlow.
        known = scaled if tf.inside_function() else None
        stage = Stage(
            known or scaled_adds > 0,
            known is False or plain_adds > 0,
            count=count,
            scale=tf.math.divide_no_nan(scales, scaled_adds) / _SMALL,
            window=weakref.ref(self),
        )
        for gradient in gradients:
            stage.mark(gradient)
        (CARRYING.add if scaled else CARRYING.discard)(self)
        self._scaled.clear()  # Another window may be of other losses.
        return reduced

    def _note_scaled(self, scaled: bool | None) -> None:
        """Notes whether a loss was scaled; all of one trace, or of one window, must be alike."""
        if tf.inside_function():
            graph = weakref.ref(tf.compat.v1.get_default_graph())
            begins, self._traced_in = graph != self._traced_in, graph
        else:
            begins = int(tf.convert_to_tensor(self._count)) == 0
        if begins:
            self._scaled.clear()
        if scaled is not None and (not scaled) in self._scaled:
            raise TfMultiGpuError(
                "The losses of one window need one loss scale.",
                "a loss that went through scale_loss and another, both in one window",
                "Differentiate scale.scale_loss(pair) of each, or create a window for each.",
            )
        self._scaled.add(scaled)

    def _context(self) -> Any:
        """The context of the replica that calls, None outside of ``strategy.run``."""
        current = tf.distribute.get_strategy()
        if current is self._strategy:
            return tf.distribute.get_replica_context()
        if not tf.distribute.has_strategy():
            return None
        raise ScopeError(
            f"The window was created in another scope, {describe(self._strategy)}.",
            describe(current),
            "Create it in strategy.scope().",
        )


def _check_entered(variables: Sequence[KerasVariable]) -> None:
    """Checks that the scope of the strategy of variables is entered, where sums will live."""
    inner = tf_variable(variables[0])
    strategy = getattr(inner, "distribute_strategy", None)
    if strategy is not None and not tf.distribute.has_strategy():
        raise ScopeError(
            "The window was created outside the scope of the strategy of its variables.",
            f"{inner.name!r} on {describe(strategy)}, and no scope",
            "Its sums live on the replicas, too:\n"
            "    with strategy.scope():\n"
            "        window = tmg.GradientAccumulator(variables)",
        )


class _Dense:
    """The sum of the gradients of a variable, of its size on each replica."""

    def __init__(self, total: Any) -> None:
        self.total, self.dtype = total, total.dtype

    def add(self, gradient: Tensor, scale: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Adds a gradient on this replica."""
        self.total.assign_add(scale(tf.cast(tf.convert_to_tensor(gradient), self.dtype)))

    def read(self, strategy: tf.distribute.Strategy) -> list[Tensor]:
        """Returns the sums of the replicas of this process."""
        return [copy.read_value() for copy in strategy.experimental_local_results(self.total)]

    def reset(self, strategy: tf.distribute.Strategy) -> None:
        """Sets all sums to zero."""
        for copy in strategy.experimental_local_results(self.total):
            with tf.device(copy.device):
                copy.assign(tf.zeros(copy.shape, copy.dtype))


class _OfTable:
    """The sum of the gradients of a large table: the rows that any of them has, each once.

    It never has more rows than the table.
    """

    def __init__(self, shape: tf.TensorShape, dtype: tf.DType) -> None:
        self._shape, self.dtype = shape, dtype
        self._ids = _local_sum([0], tf.int64, of_rows=[None])
        self._values = _local_sum([0, *shape[1:]], dtype, of_rows=[None, *shape[1:]])

    def add(self, gradient: Tensor, scale: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Adds a gradient on this replica; a tensor has all rows."""
        if not is_list(gradient):
            every = tf.range(self._shape[0] or 0, dtype=tf.int64)
            gradient = tf.IndexedSlices(tf.convert_to_tensor(gradient), every)
        new = row_list(gradient, self._shape, self.dtype)
        new = with_values(new, scale(new.values))
        before = tf.IndexedSlices(self._values.read_value(), self._ids.read_value())
        rows = unique(joined([before, new]))
        self._ids.assign(rows.indices)
        self._values.assign(rows.values)

    def read(self, strategy: tf.distribute.Strategy) -> list[Tensor]:
        """Returns the sums of the replicas of this process: lists, if these can be added."""
        local = strategy.experimental_local_results
        sums: list[Tensor] = []
        for ids, values in zip(local(self._ids), local(self._values), strict=True):
            rows = tf.IndexedSlices(values.read_value(), ids.read_value())
            sums.append(rows if adds_lists(strategy) else as_tensor(rows, self._shape))
        return sums

    def reset(self, strategy: tf.distribute.Strategy) -> None:
        """Forgets all rows."""
        local = strategy.experimental_local_results
        for ids, values in zip(local(self._ids), local(self._values), strict=True):
            with tf.device(ids.device):
                # None of them, in an open shape: with zeros of shape [0] TensorFlow's optimizer
                # takes what was read before for empty as well.
                none = tf.where(ids.read_value() < 0)[:, 0]
                values.assign(tf.gather(values.read_value(), none))
                ids.assign(tf.gather(ids.read_value(), none))


def _sum_of(variable: KerasVariable) -> _Dense | _OfTable:
    dtype, shape = sum_dtype(variable.dtype), tf.TensorShape(variable.shape)
    if is_table(variable):
        return _OfTable(shape, dtype)
    return _Dense(_local_sum(shape.as_list(), dtype))


def _same(value: tf.Tensor) -> tf.Tensor:
    return value


def _local_sum(
    shape: Sequence[int | None],
    dtype: tf.DType,
    aggregation: tf.VariableAggregation = tf.VariableAggregation.SUM,
    of_rows: Sequence[int | None] | None = None,
) -> Any:
    """Returns a variable of each replica, of zeros; ``of_rows`` if the shape may change."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation,
        shape=of_rows,
    )
