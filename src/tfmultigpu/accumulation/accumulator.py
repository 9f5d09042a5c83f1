"""Adding gradients over micro-batches, without communication until the sum is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import check_reduced, sum_dtype
from tfmultigpu.accumulation.loss_sum import is_fixed
from tfmultigpu.accumulation.owners import refuse_float8
from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.strategies.collectives import sum_over_replicas
from tfmultigpu.strategies.topology import describe


class GradientAccumulator:
    """Adds gradients and weights on each replica, and over the replicas once per window.

    For loops written by hand; ``make_train_step(micro_batches=k)`` does the same by itself. What is
    added are gradients of loss *sums*, with the weights the sums are to be divided by; what comes
    out is the gradient of the mean over the whole window. The short window at the end of the data
    needs no special case.

    Sums are kept in at least float32. Save checkpoints between windows: TensorFlow spreads sums
    that differ between replicas evenly when it restores them.

    Attributes:
        variables: The variables gradients are for, in order.

    Example:
        >>> import keras, tensorflow as tf, tfmultigpu as tmg
        >>> weight = keras.Variable([1.0])
        >>> accumulator = tmg.GradientAccumulator([weight])
        >>> accumulator.add([tf.constant([6.0])], weight=2.0)
        >>> accumulator.add([tf.constant([3.0])], weight=1.0)
        >>> accumulator.count
        2
        >>> gradients, weight = accumulator.reduce()
        >>> gradients[0].numpy().tolist(), float(weight)
        ([3.0], 3.0)
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Creates the state; call in ``strategy.scope()``.

        Args:
            variables: Keras or TensorFlow variables.

        Raises:
            TfMultiGpuError: There are no variables, or one that is overwritten by its gradient.
        """
        self.variables = list(variables) if isinstance(variables, Iterable) else []
        self._strategy = tf.distribute.get_strategy()
        if not self.variables:
            raise TfMultiGpuError(
                "There is nothing to accumulate gradients for: no variables were given. Received: "
                f"a {type(variables).__name__}. Build the model first, then write "
                "tmg.GradientAccumulator(model.trainable_variables)."
            )
        refuse_float8(self.variables)
        self._sums = [_local_sum(v.shape, sum_dtype(v.dtype)) for v in self.variables]
        wide = tf.float64 in [total.dtype for total in self._sums]
        self._weight = _local_sum([], tf.float64 if wide else tf.float32)
        self._count = _local_sum([], tf.int64, tf.VariableAggregation.ONLY_FIRST_REPLICA)
        self._fixed: bool | None = None  # Whether the weights are those of ``reduction="sum"``.

    @property
    def count(self) -> Any:
        """Micro-batches added since the last ``reduce``: an int, or a tensor inside a function."""
        count = tf.convert_to_tensor(self._count)
        return count if tf.inside_function() else int(count)

    def add(self, gradients: Sequence[Any], weight: Any) -> None:
        """Adds one micro-batch on this replica, without communication; replica context.

        Args:
            gradients: Gradients of the *sum* of losses, one per variable. ``tf.IndexedSlices`` are
                added into place, repeated rows included; None counts as zero.
            weight: What that sum is to be divided by, a scalar: the ``weight`` of its ``LossSum``.
                That of a loss with ``reduction="sum"`` stays 1, however often it is added.

        Raises:
            TfMultiGpuError: Not as many gradients as variables, called outside a replica, or only
                some of the losses have ``reduction="sum"``.
            ScopeError: The accumulator was created under another strategy.
        """
        if len(gradients) != len(self.variables):
            raise TfMultiGpuError(
                f"There must be one gradient per variable. Received: {len(gradients)} gradients "
                f"for {len(self.variables)} variables. Pass None for a variable without gradient."
            )
        if self._context() is None:
            raise TfMultiGpuError(
                "add keeps a sum per replica, so each replica must call it: call it in the "
                "function given to strategy.run."
            )
        if self._fixed not in (None, is_fixed(weight)):
            raise TfMultiGpuError(
                'A sum of a loss with reduction="sum" is divided by 1, and another by its weight. '
                "Received: both in one accumulator. Create one for each."
            )
        self._fixed = is_fixed(weight)
        for total, gradient in zip(self._sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):  # It may not know the shape of the whole.
                shape = tf.cast(tf.shape(total), gradient.indices.dtype)
                gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        weight = -math.inf if self._fixed else weight  # However many there are, it is 1.
        self._weight.assign_add(tf.cast(weight, self._weight.dtype))
        self._count.assign_add(1)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def reduce(self) -> tuple[list[Any], tf.Tensor]:
        """Returns the gradient of the window over all replicas and empties the accumulator.

        Call it once, outside of ``strategy.run``; a ``tf.function`` is fine. Nothing else
        communicates.

        Returns:
            Gradients already divided by the weight (0 where that is 0), in the variables' dtypes,
            and the weight of the window. Pass them to ``LossScale.unscale``, ``clip_gradients`` and
            ``apply_reduced_gradients``.

        Raises:
            TfMultiGpuError: Called by one of several replicas, inside ``strategy.run``.
            ScopeError: The accumulator was created under another strategy.
        """
        strategy = self._strategy
        if self._context() is not None:
            check_reduced("reduce")
        copies = map(strategy.experimental_local_results, [*self._sums, self._weight])
        parts = [[copy.read_value() for copy in each] for each in zip(*copies, strict=True)]
        totals = sum_over_replicas(strategy, parts)
        with tf.control_dependencies([tensor for part in parts for tensor in part]):
            self._clear()
        *sums, weight = totals[0]
        weight = tf.where(tf.equal(weight, -math.inf), tf.ones_like(weight), weight)
        gradients = []
        for total, variable in zip(sums, self.variables, strict=True):
            with tf.device(total.device):
                mean = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
                gradients.append(tf.cast(mean, variable.dtype))
        return gradients, weight

    def _context(self) -> Any:
        """The context of the replica that calls, None outside of ``strategy.run``."""
        current = tf.distribute.get_strategy()
        if current is self._strategy:
            return tf.distribute.get_replica_context()
        if not tf.distribute.has_strategy():
            return None
        raise ScopeError(
            "The accumulator was created in another scope than it is used in. Received: "
            f"{describe(current)}; created under {describe(self._strategy)}. Write: with "
            "strategy.scope(): accumulator = tmg.GradientAccumulator(variables)."
        )

    def _clear(self) -> None:
        for variable in [*self._sums, self._weight, self._count]:
            for copy in self._strategy.experimental_local_results(variable):
                with tf.device(copy.device):
                    copy.assign(tf.zeros(copy.shape, copy.dtype))


def _local_sum(
    shape: Any, dtype: tf.DType, aggregation: Any = tf.VariableAggregation.SUM
) -> tf.Variable:
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=aggregation,
    )
