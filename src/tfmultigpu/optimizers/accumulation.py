"""Adding gradients over micro-batches, without communication until the sum is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import ScopeError, TfMultiGpuError
from tfmultigpu.optimizers.gradients import is_overwritten, sum_dtype
from tfmultigpu.strategies.collectives import all_reduce_sum
from tfmultigpu.strategies.not_copied import NotCopied

__all__ = ["GradientAccumulator"]


class GradientAccumulator(NotCopied):
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
            TypeError: They are something else, such as a model.
        """
        if not isinstance(variables, Iterable):
            raise TypeError(
                "GradientAccumulator takes the variables whose gradients it adds. Received: "
                f"{type(variables).__name__}. Write "
                "tmg.GradientAccumulator(model.trainable_variables)."
            )
        self.variables = list(variables)
        self._strategy = tf.distribute.get_strategy()
        if not self.variables:
            raise TfMultiGpuError(
                "There is nothing to accumulate gradients for: no variables were given. Build the "
                "model first, then pass model.trainable_variables."
            )
        overwritten = [v.path for v in self.variables if is_overwritten(v)]
        if overwritten:
            raise TfMultiGpuError(
                "The gradient of a variable of a float8 layer is its new value, which cannot be "
                f"added and divided. Received: {overwritten[:3]}. Leave out "
                'layer.quantize("float8"), or train without accumulation.'
            )
        self._sums = [_local_sum(v.shape, sum_dtype(v.dtype)) for v in self.variables]
        self._weight = _local_sum([], tf.float32)
        self._count = tf.Variable(
            tf.constant(0, tf.int64),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

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

        Raises:
            TfMultiGpuError: Not as many gradients as variables, or called outside a replica.
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
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        self._weight.assign_add(tf.cast(weight, tf.float32))
        self._count.assign_add(1)

    def reduce(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the gradient of the window over all replicas and empties the accumulator.

        One all-reduce, packed. Call it on every replica (in ``strategy.run``), or once outside,
        where it runs on every replica by itself.

        Returns:
            Gradients already divided by the weight (0 where that is 0), in the variables' dtypes,
            and the weight of the window. Pass the gradients to ``apply_reduced_gradients``.
        """
        context = self._context()
        if context is not None:
            return self._reduce_in_replica(context)
        strategy = self._strategy
        results = strategy.run(lambda: self._reduce_in_replica(tf.distribute.get_replica_context()))
        first = [strategy.experimental_local_results(r)[0] for r in tf.nest.flatten(results)]
        return first[:-1], first[-1]

    def reset(self) -> None:
        """Drops what was added, by assignment, so that a NaN does not outlive its window."""
        if self._context() is None:
            self._strategy.run(self._clear)
        else:
            self._clear()

    def _context(self) -> Any:
        """The context of the replica that calls, None outside of ``strategy.run``."""
        current = tf.distribute.get_strategy()
        if current is self._strategy:
            return tf.distribute.get_replica_context()
        if not tf.distribute.has_strategy():
            return None
        raise ScopeError(
            "The accumulator was created in another scope than it is used in. Received: "
            f"{type(current).__name__} with {current.num_replicas_in_sync} replicas, and it was "
            f"made under {type(self._strategy).__name__} with "
            f"{self._strategy.num_replicas_in_sync}. Create it in the scope it is used in: "
            "with strategy.scope(): accumulator = tmg.GradientAccumulator(variables)."
        )

    def _reduce_in_replica(self, context: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        parts = [tf.identity(variable.read_value()) for variable in [*self._sums, self._weight]]
        *sums, weight = all_reduce_sum(context, parts)
        with tf.control_dependencies(parts):
            self._clear()
        gradients = [
            tf.cast(tf.math.divide_no_nan(total, tf.cast(weight, total.dtype)), variable.dtype)
            for total, variable in zip(sums, self.variables, strict=True)
        ]
        return gradients, weight

    def _clear(self) -> None:
        for variable in [*self._sums, self._weight, self._count]:
            variable.assign(tf.zeros_like(variable.read_value()))


def _local_sum(shape: Any, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
