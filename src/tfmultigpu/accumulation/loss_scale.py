"""Loss scaling for float16: one verdict about the global gradient, the same on every replica."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu.accumulation.gradients import all_finite, check_reduced, sum_dtype
from tfmultigpu.accumulation.losses import LossSum, Use, note_use, use_of
from tfmultigpu.accumulation.shown import shown
from tfmultigpu.accumulation.stages import CARRYING, check_to_unscale, mark_as, scale_of
from tfmultigpu.arguments import brief, check_count, check_positive
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import map_present, present
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.strategies.row_lists import values_of, with_values
from tfmultigpu.types import KerasOptimizer, KerasVariable, Scalar, Tensor

# Windows of 16 batches are as many times larger, and the shard of another replica, which is not
# known here, may have a row more: at most twice as many.
_ROOM = 32.0


class LossScale:
    """A factor that keeps float16 gradients from becoming zero, for loops written by hand.

    A dynamic scale halves when a gradient overflows, never below 1, and doubles after a run of good
    steps, as ``keras.optimizers.LossScaleOptimizer`` does (Micikevicius et al. 2018, arXiv
    1710.03740). A fixed scale stays. Either way, skip the update of a step whose gradients are not
    finite.

    Attributes:
        growth_steps: Good steps after which the scale doubles; None if it is fixed.
        good_steps: Good steps since the scale changed, an integer variable; None if it is fixed.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> loss_scale = tmg.LossScale(8.0)
        >>> gradients, finite = loss_scale.unscale([tf.constant([float("inf")])])
        >>> loss_scale.update(finite)
        >>> float(loss_scale.scale_loss(tf.constant(0.5)))
        2.0
    """

    growth_steps: int | None
    good_steps: Scalar
    _scale: Scalar
    _uses: tuple[Use, ...] = ()  # Of pairs, until ``unscale`` has seen their division undone.
    _scaled_others = False  # Whether it may have multiplied a loss without a note on its pair.
    _strategy: tf.distribute.Strategy | None = None

    def __init__(self, initial: float = 2.0**15, growth_steps: int | None = 2000) -> None:
        """Creates the variables of a dynamic scale; call it in ``strategy.scope()``.

        Args:
            initial: The scale to begin with, positive and finite.
            growth_steps: Good steps after which the scale doubles. None: the scale is fixed.

        Raises:
            ValueError: ``initial`` is not a positive, finite number, or ``growth_steps`` is less
                than 1.
            TypeError: ``growth_steps`` is neither a whole number nor None.
        """
        if isinstance(initial, str):
            raise ValueError(
                "A LossScale is dynamic unless growth_steps is None, and begins at a number. "
                f"Received: initial={brief(initial)}. Write tmg.LossScale()."
            )
        initial = check_positive("initial", initial, "Write tmg.LossScale() for 2**15.")
        self._strategy = tf.distribute.get_strategy()
        self.growth_steps, self._scale, self.good_steps = None, initial, None
        if growth_steps is not None:
            self.growth_steps = check_count("growth_steps", growth_steps, other="None")
            self._scale = _variable("loss_scale", initial)
            self.good_steps = _variable("good_steps", 0)

    def __repr__(self) -> str:
        """Returns the scale, and how many good steps are left until it doubles."""
        if self.growth_steps is None:
            return f"<LossScale {shown(self._scale)}, fixed>"
        good_steps = shown(tf.convert_to_tensor(self.good_steps))
        until = f"{good_steps} of {self.growth_steps} good steps until it doubles"
        return f"<LossScale {shown(self._value())}, dynamic: {until}>"

    @property
    def variables(self) -> list[KerasVariable]:
        """The variables that hold its state, for checkpoints; none if it is fixed."""
        if self.growth_steps is None:
            return []
        return [self._scale, self.good_steps]

    @property
    def scale(self) -> Scalar:
        """The scale, a float32 variable; a float if it is fixed."""
        CARRYING.clear()  # Who reads it may divide by it.
        context = tf.distribute.get_replica_context()
        if context is not None:  # A replica may multiply by it, where no pair notes that.
            several = context.num_replicas_in_sync > 1
            if several or context.strategy is self._strategy:
                self._scaled_others = True
        return self._scale

    def value(self) -> Scalar:
        """Returns the scale for the next step, a float32 scalar."""
        return tf.convert_to_tensor(self.scale, tf.float32)

    def _value(self) -> Scalar:
        return tf.convert_to_tensor(self._scale, tf.float32)

    def scale_loss(self, loss: LossSum | Scalar) -> Scalar:
        """Returns what to differentiate: the scale times a mean, so that float16 can hold it.

        Scale the pair of ``loss_sum``, and add its gradient with the same pair:
        ``window.add(gradients, pair)`` makes it the gradient of the sum again. A sum is larger than
        a mean by the number of rows, so it overflows much sooner.

        Args:
            loss: A ``LossSum``; or a mean, a scalar of any float dtype, which is multiplied.

        Returns:
            A scalar. A pair is divided by its weight, the number of replicas and 32. That leaves as
            much room as ``make_train_step`` has with 16 micro-batches.
        """
        use, value = use_of(loss), self._value()
        if not isinstance(loss, LossSum):
            self._scaled_others |= use is None
            (use or Use()).scale_by(value)
            return loss * tf.cast(value, loss.dtype)
        total = tf.convert_to_tensor(loss.sum)
        total = tf.cast(total, sum_dtype(total.dtype))

        # Each replica and each batch has a divisor of its own, so the window multiplies by it.
        weight = tf.cast(tf.stop_gradient(loss.weight), total.dtype)
        replicas = getattr(tf.distribute.get_replica_context(), "num_replicas_in_sync", 1)
        divisor = tf.where(weight > 0, weight, tf.ones_like(weight)) * (replicas * _ROOM)
        if use is None:  # A pair of the user's.
            use = Use()
            note_use(loss, use)
        use.scale_by(value)
        use.divide(divisor)
        self._uses = (*(other for other in self._uses if not other.undone), use)
        return total * (tf.cast(value, total.dtype) / divisor)

    def unscale(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Scalar]:
        """Divides gradients by the scale, and says whether all are finite.

        Args:
            gradients: The gradients of the global batch, from ``GradientAccumulator.reduce``. None
                stays None.

        Returns:
            The gradients, of at least float32; and whether all are finite, a bool scalar.

        Raises:
            TfMultiGpuError: It is called by one of several replicas, inside ``strategy.run``; the
                window did not get the pair that was scaled, or got none that was; or the gradients
                were unscaled or clipped before.
        """
        check_reduced("unscale", gradients)
        after = check_to_unscale(gradients, has_scaled=self._scaled_others)
        uses, self._uses = self._uses, ()  # They belong to one trace.
        if any(use.lost for use in uses):
            raise TfMultiGpuError(
                "scale_loss divided a LossSum to the size of a mean, and nothing multiplied its "
                "gradient by that number again.",
                "a window without that pair; a pair that a tf.function returns is another one",
                "Write window.add(gradients, pair) in the function that calls scale_loss; for "
                "several losses make one pair first, pair = tmg.LossSum(p.sum + q.sum, p.weight), "
                "or a window for each; or, without a GradientAccumulator, scale a mean over the "
                "rows of the global batch: scale.scale_loss(mean).",
            )

        def divide(gradient: Tensor) -> Tensor:
            if not hasattr(gradient, REDUCED):  # A list may have a row twice.
                gradient = tf.convert_to_tensor(gradient)
            scale = scale_of(gradient, self._value())  # Another window may have changed it since.
            values = values_of(gradient)
            values = tf.cast(values, sum_dtype(values.dtype))
            return with_values(gradient, values / tf.cast(scale, values.dtype))

        with tf.control_dependencies(after):
            divided = mark_as(gradients, map_present(divide, gradients), unscaled=True)
        return divided, all_finite(present(divided))

    def update(self, finite: Scalar) -> None:
        """Halves, doubles or keeps the scale; call it once for each window.

        Args:
            finite: What ``unscale`` returned: whether all gradients are finite, a bool scalar.

        Raises:
            TfMultiGpuError: It is called by one of several replicas, inside ``strategy.run``.
        """
        check_reduced("LossScale.update")
        if self.growth_steps is None:
            return
        scale, good = self._value(), tf.convert_to_tensor(self.good_steps)
        grow = finite & (good >= self.growth_steps - 1)
        grown = tf.where(grow & tf.math.is_finite(scale * 2.0), scale * 2.0, scale)
        self._scale.assign(tf.where(finite, grown, tf.maximum(scale * 0.5, 1.0)))
        self.good_steps.assign(tf.where(finite & ~grow, good + 1, tf.zeros_like(good)))


class _KerasLossScale(LossScale):
    """The dynamic scale of a ``LossScaleOptimizer``, in whose variables it is kept."""

    def __init__(self, optimizer: KerasOptimizer) -> None:
        self.growth_steps = optimizer.dynamic_growth_steps
        self._scale, self.good_steps = optimizer.dynamic_scale.value, optimizer.step_counter.value


def _variable(name: str, value: float) -> tf.Variable:
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(tf.constant(value), trainable=False, name=name, aggregation=first)


def unwrap_optimizer(optimizer: KerasOptimizer) -> KerasOptimizer:
    """Returns the optimizer inside a ``keras.optimizers.LossScaleOptimizer``, or itself."""
    import keras

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def parts_of(optimizer: KerasOptimizer) -> list[KerasOptimizer]:
    """Returns the optimizers inside a ``MultiOptimizer``, or the optimizer itself."""
    return list(getattr(optimizer, "optimizers", ())) or [optimizer]


def make_loss_scale(
    loss_scale: str | float | None, optimizer: KerasOptimizer, strategy: tf.distribute.Strategy
) -> LossScale | None:
    """Returns the loss scale for a training step of a built optimizer.

    The variables of a ``LossScaleOptimizer`` hold its state; for others it is kept here.
    """
    if unwrap_optimizer(optimizer) is not optimizer:
        if loss_scale not in (None, "dynamic"):
            raise ValueError(
                f"A LossScaleOptimizer scales dynamically. Leave out loss_scale={loss_scale!r}."
            )
        return _KerasLossScale(optimizer)
    if loss_scale is None:
        loss_scale = optimizer.loss_scale_factor
    if loss_scale is None:
        return None
    if loss_scale != "dynamic":
        write = 'Write loss_scale="dynamic", or None without float16.'
        return LossScale(check_positive("loss_scale", loss_scale, write), growth_steps=None)
    if optimizer not in kept_loss_scales:
        with strategy.scope():
            kept_loss_scales[optimizer] = LossScale()
    return kept_loss_scales[optimizer]


kept_loss_scales: weakref.WeakKeyDictionary[KerasOptimizer, LossScale] = weakref.WeakKeyDictionary()
