"""Adding gradients over micro-batches, without communication until the sum is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import check_reduced, refuse_float8, sum_dtype
from tfmultigpu.accumulation.losses import is_fixed
from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.strategies.collectives import REDUCED, sum_over_replicas
from tfmultigpu.strategies.scopes import check_scope, current_strategy
from tfmultigpu.strategies.topology import describe


class GradientAccumulator:
    """Adds gradients and weights on each replica, and over the replicas once per window.

    Takes gradients of loss *sums*, with the weights that divide these; gives the gradient of the
    mean over the whole window, however short. Sums are kept in at least float32. Save checkpoints
    between windows: TensorFlow restores sums evenly spread over the replicas.

    Attributes:
        variables: The variables gradients are for, in order.

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

    def __init__(self, variables: Sequence[Any]) -> None:
        """Creates the state of each replica; call it in ``strategy.scope()``."""
        self.variables = list(variables) if isinstance(variables, Iterable) else []
        if not self.variables:
            raise TfMultiGpuError(
                f"Received: a {type(variables).__name__}, no variables. Build the model, and give "
                "tmg.GradientAccumulator(model.trainable_variables)."
            )
        self._strategy = current_strategy(None, "GradientAccumulator", self)
        check_scope(self.variables, self._strategy, "model")
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
            gradients: Gradients of the *sum* of losses, one per variable; None counts as zero.
            weight: What divides that sum, a scalar: the ``weight`` of its ``LossSum``.

        Raises:
            TfMultiGpuError: Not as many gradients as variables; called outside a replica; some of
                the losses alone have ``reduction="sum"``; created under another strategy.
        """
        if len(gradients) != len(self.variables):
            raise TfMultiGpuError(
                f"Received: {len(gradients)} gradients for {len(self.variables)} variables. Pass "
                "None for a variable without gradient."
            )
        if self._context() is None:
            raise TfMultiGpuError("add is for each replica: call it inside strategy.run.")
        if self._fixed not in (None, is_fixed(weight)):
            raise TfMultiGpuError(
                'Received: a loss with reduction="sum" and another, both in one accumulator, which '
                "divides by 1 or by the weight. Create one for each."
            )
        self._fixed = is_fixed(weight)
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        weight = -math.inf if self._fixed else weight  # However many there are, it is 1.
        self._weight.assign_add(tf.cast(weight, self._weight.dtype))
        self._count.assign_add(1)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def reduce(self) -> tuple[list[Any], tf.Tensor]:
        """Adds over the replicas, once, outside of ``strategy.run``; empties the accumulator.

        Returns:
            Gradients already divided by the weight (0 where that is 0), in the variables' dtypes,
            and the weight of the window.

        Raises:
            TfMultiGpuError: Called inside ``strategy.run``; created under another strategy.
        """
        if self._context() is not None:
            check_reduced("reduce")
        local = self._strategy.experimental_local_results
        copies = map(local, [*self._sums, self._weight])
        parts = [[copy.read_value() for copy in each] for each in zip(*copies, strict=True)]
        totals = sum_over_replicas(self._strategy, parts)
        with tf.control_dependencies([tensor for part in parts for tensor in part]):
            for variable in [*self._sums, self._weight, self._count]:
                for copy in local(variable):
                    with tf.device(copy.device):
                        copy.assign(tf.zeros(copy.shape, copy.dtype))
        *sums, weight = totals[0]
        weight = tf.where(tf.equal(weight, -math.inf), tf.ones_like(weight), weight)
        gradients = []
        for total, variable in zip(sums, self.variables, strict=True):
            with tf.device(total.device):
                mean = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
                gradients.append(tf.cast(mean, variable.dtype))
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
            f"The accumulator is of another scope, {describe(self._strategy)}. Received: "
            f"{describe(current)}. Create it in strategy.scope()."
        )


def _local_sum(shape: Any, dtype: Any, aggregation: Any = tf.VariableAggregation.SUM) -> Any:
    on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": aggregation}
    return tf.Variable(tf.zeros(shape, dtype), trainable=False, **on_read)
