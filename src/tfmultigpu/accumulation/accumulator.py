"""Adding gradients over micro-batches, without communication until the sum is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import check_reduced, refuse_float8, sum_dtype
from tfmultigpu.accumulation.losses import LossSum, division_of, is_fixed
from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.strategies.collectives import REDUCED, sum_over_replicas
from tfmultigpu.strategies.scopes import check_scope, current_strategy, refuse_legacy_keras
from tfmultigpu.strategies.topology import describe, tf_variable
from tfmultigpu.types import KerasVariable, Scalar


class GradientAccumulator:
    """Adds gradients and weights on each replica, and over the replicas once per window.

    ``add`` takes gradients of loss *sums*, with the weights that divide them. ``reduce`` returns
    the gradient of the mean over the whole window, however short. Sums are kept in at least
    float32. Save checkpoints between windows: TensorFlow restores sums evenly spread over the
    replicas.

    Attributes:
        variables: The variables that the gradients are for, in order.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> weight = keras.Variable([1.0])
        >>> accumulator = tmg.GradientAccumulator([weight])
        >>> accumulator.add([tf.constant([6.0])], weight=2.0)
        >>> accumulator.add([tf.constant([3.0])], weight=1.0)
        >>> gradients, weight = accumulator.reduce()
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
        self._sums = [_local_sum(v.shape, sum_dtype(v.dtype)) for v in self.variables]
        wide = tf.float64 in [total.dtype for total in self._sums]
        # The sum of the weights, and how many were added of which each is 1 in total.
        self._weights = _local_sum([2], tf.float64 if wide else tf.float32)
        self._count = _local_sum([], tf.int64, tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self._fixed: bool | None = None  # Whether the weights are those of ``reduction="sum"``.

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

    def add(self, gradients: Sequence[Any], weight: Scalar) -> None:
        """Adds one micro-batch on this replica, without communication; replica context.

        Args:
            gradients: Gradients of the *sum* of losses, one per variable; None counts as zero.
            weight: The ``LossSum`` whose ``sum``, or ``scale_loss`` of it, was differentiated; or
                the weight of that pair, a scalar, by which the sum is to be divided.

        Raises:
            TfMultiGpuError: There is another number of gradients than of variables; it is called
                outside a replica; only some of the losses have ``reduction="sum"``; or it was
                created under another strategy.
        """
        if len(gradients) != len(self.variables):
            raise TfMultiGpuError(
                "add takes one gradient for each variable.",
                f"{len(gradients)} gradients for {len(self.variables)} variables",
                "Pass None for a variable without gradient.",
            )
        if self._context() is None:
            raise TfMultiGpuError("add is for each replica: call it inside strategy.run.")
        fixed, division = is_fixed(weight), division_of(weight)
        if self._fixed not in (None, fixed):
            raise TfMultiGpuError(
                "The losses of one accumulator need one way to divide.",
                'a loss with reduction="sum" and another, both in one accumulator, which divides '
                "by 1 or by the weight",
                "Create an accumulator for each.",
            )
        self._fixed = fixed

        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                wide = tf.cast(tf.convert_to_tensor(gradient), total.dtype)
                total.assign_add(wide if division is None else division.undo(wide))

        number = weight.weight if isinstance(weight, LossSum) else weight
        number = tf.cast(number, self._weights.dtype)
        self._weights.assign_add([0.0, 1.0] if fixed else [number, 0.0])
        self._count.assign_add(1)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def reduce(self) -> tuple[list[Any], tf.Tensor]:
        """Adds over the replicas, once, outside of ``strategy.run``; empties the accumulator.

        Returns:
            Gradients already divided by the weight (0 if that is 0), in the variables' dtypes, but
            float32 for float16, which may not hold them before ``unscale``; and the weight of the
            window, a scalar of at least float32.

        Raises:
            TfMultiGpuError: It is called inside ``strategy.run``, or was created under another
                strategy.
        """
        if self._context() is not None:
            check_reduced("reduce")
        local = self._strategy.experimental_local_results
        copies = map(local, [*self._sums, self._weights])
        parts = [[copy.read_value() for copy in each] for each in zip(*copies, strict=True)]
        totals = sum_over_replicas(self._strategy, parts)
        with tf.control_dependencies([tensor for part in parts for tensor in part]):
            for variable in [*self._sums, self._weights, self._count]:
                for copy in local(variable):
                    with tf.device(copy.device):
                        copy.assign(tf.zeros(copy.shape, copy.dtype))
        *sums, weights = totals[0]
        weight, fixed = tf.unstack(weights, num=2)
        weight = tf.where(fixed > 0, tf.ones_like(weight), weight)
        gradients = []
        for total, variable in zip(sums, self.variables, strict=True):
            with tf.device(total.device):
                mean = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
                is_float16 = tf.as_dtype(variable.dtype) == tf.float16
                gradients.append(mean if is_float16 else tf.cast(mean, variable.dtype))
                setattr(gradients[-1], REDUCED, True)
        return gradients, weight

    def _context(self) -> Any:
        """The context of the replica that calls, None outside of ``strategy.run``."""
        current = tf.distribute.get_strategy()
        if current is self._strategy:
            return tf.distribute.get_replica_context()
        if not tf.distribute.has_strategy():
            return None
        raise ScopeError(
            f"The accumulator was created in another scope, {describe(self._strategy)}.",
            describe(current),
            "Create it in strategy.scope().",
        )


def _check_entered(variables: Sequence[KerasVariable]) -> None:
    """Checks that the scope of the strategy of variables is entered, where sums will live."""
    inner = tf_variable(variables[0])
    strategy = getattr(inner, "distribute_strategy", None)
    if strategy is not None and not tf.distribute.has_strategy():
        raise ScopeError(
            "The accumulator was created outside the scope of the strategy of its variables.",
            f"{inner.name!r} on {describe(strategy)}, and no scope",
            "Its sums live on the replicas, too:\n"
            "    with strategy.scope():\n"
            "        window = tmg.GradientAccumulator(variables)",
        )


def _local_sum(shape: Any, dtype: Any, aggregation: Any = tf.VariableAggregation.SUM) -> Any:
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": aggregation}
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, **on_read)
