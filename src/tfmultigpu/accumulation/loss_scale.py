"""Loss scaling for float16: one verdict about the global gradient, the same on every replica."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import all_finite, check_reduced, sum_dtype


class LossScale:
    """A factor that keeps float16 gradients from becoming zero, for loops written by hand.

    A dynamic scale halves when a gradient overflows, never below 1, and doubles after a run of good
    steps: the rule of ``keras.optimizers.LossScaleOptimizer``, with its constants. A fixed one
    stays. Either way, skip the update of a step whose gradients are not finite.

    Attributes:
        scale: The scale, a float32 variable; a float if it is fixed.
        good_steps: Good steps since the scale changed, an integer variable; None if it is fixed.
        growth_steps: Good steps after which the scale doubles; None if it is fixed.

    Example:
        >>> import tensorflow as tf, tfmultigpu as tmg
        >>> loss_scale = tmg.LossScale(8.0)
        >>> float(loss_scale.scale_loss(tf.constant(0.5)))
        4.0
        >>> gradients, finite = loss_scale.unscale([tf.constant([16.0])])
        >>> gradients[0].numpy().tolist(), bool(finite)
        ([2.0], True)
        >>> loss_scale.update(tf.constant(False))
        >>> float(loss_scale.value())
        4.0
    """

    def __init__(self, initial: float = 2.0**15, growth_steps: int | None = 2000) -> None:
        """Creates the variables of a dynamic scale; call it in ``strategy.scope()``.

        Args:
            initial: The scale to begin with, positive and finite.
            growth_steps: Good steps after which the scale doubles. None: the scale is fixed.

        Raises:
            ValueError: ``initial`` is not positive and finite.
        """
        if isinstance(initial, bool | str) or not 0 < initial < math.inf:
            raise ValueError(
                "A loss scale is a positive, finite number, or None or 'dynamic' for a step. "
                f"Received: loss_scale={initial!r}."
            )
        self.growth_steps = growth_steps
        self.scale: Any = float(initial)
        self.good_steps: Any = None
        if growth_steps is not None:
            self.scale = _scalar(self.scale, "loss_scale")
            self.good_steps = _scalar(0, "good_steps")

    @classmethod
    def of_variables(cls, scale: Any, good_steps: Any, growth_steps: int) -> LossScale:
        """Returns a dynamic scale whose state somebody else holds."""
        own = cls(growth_steps=None)
        own.scale, own.good_steps, own.growth_steps = scale, good_steps, growth_steps
        return own

    @property
    def variables(self) -> list[Any]:
        """The variables that hold its state, for checkpoints; none if it is fixed."""
        return [] if self.growth_steps is None else [self.scale, self.good_steps]

    def value(self) -> Any:
        """Returns the scale for the next step, a float32 scalar."""
        return tf.convert_to_tensor(self.scale, tf.float32)

    def scale_loss(self, loss: Any) -> Any:
        """Returns a loss, a scalar of any float dtype, times the scale, to differentiate."""
        return loss * tf.cast(self.value(), loss.dtype)

    def unscale(self, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Returns gradients divided by the scale, and whether all of them are finite.

        Args:
            gradients: Those of the global batch, as ``GradientAccumulator.reduce`` returns them.
                None stays None.

        Returns:
            The gradients, at least float32, and a bool scalar.

        Raises:
            TfMultiGpuError: Called by one of several replicas, inside ``strategy.run``.
        """
        check_reduced("unscale", gradients)

        def divide(gradient: Any) -> Any:
            tensor = tf.cast(tf.convert_to_tensor(gradient), sum_dtype(gradient.dtype))
            return tensor / tf.cast(self.value(), tensor.dtype)

        divided = [None if gradient is None else divide(gradient) for gradient in gradients]
        return divided, all_finite([each for each in divided if each is not None])

    def update(self, finite: Any) -> None:
        """Halves, doubles or keeps the scale; call it once, outside of ``strategy.run``.

        Args:
            finite: Whether the gradients of the step were finite, a bool scalar.

        Raises:
            TfMultiGpuError: Called by one of several replicas, inside ``strategy.run``.
        """
        check_reduced("LossScale.update")
        if self.growth_steps is None:
            return
        scale = tf.convert_to_tensor(self.scale)
        good = tf.convert_to_tensor(self.good_steps)
        grow = finite & (good >= self.growth_steps - 1)
        grown = tf.where(grow, scale * 2.0, scale)
        grown = tf.where(tf.math.is_finite(grown), grown, scale)
        self.scale.assign(tf.where(finite, grown, tf.maximum(scale * 0.5, 1.0)))
        self.good_steps.assign(tf.where(finite & ~grow, good + 1, tf.zeros_like(good)))


def unwrap_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside a ``keras.optimizers.LossScaleOptimizer``, or itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def make_loss_scale(
    loss_scale: str | float | None, optimizer: Any, strategy: tf.distribute.Strategy
) -> LossScale | None:
    """Returns the loss scale for a training step of a built optimizer.

    A ``keras.optimizers.LossScaleOptimizer`` asks for dynamic scaling, and its own variables hold
    the state, so that they are saved with it. For any other the state is kept as long as it lives.
    A number set as ``optimizer.loss_scale_factor`` counts as if given here.
    """
    if unwrap_optimizer(optimizer) is not optimizer:
        if loss_scale not in (None, "dynamic"):
            raise ValueError(
                "A LossScaleOptimizer scales dynamically. Received: "
                f"loss_scale={loss_scale!r} beside it. Leave one of them out."
            )
        return LossScale.of_variables(
            optimizer.dynamic_scale.value,
            optimizer.step_counter.value,
            optimizer.dynamic_growth_steps,
        )
    asked = optimizer.loss_scale_factor if loss_scale is None else loss_scale
    if asked is None:
        return None
    if asked != "dynamic":
        return LossScale(asked, growth_steps=None)  # type: ignore[arg-type]
    if optimizer not in _kept:
        with strategy.scope():
            _kept[optimizer] = LossScale()
    return _kept[optimizer]


def kept_loss_scale(optimizer: Any) -> LossScale | None:
    """Returns the dynamic loss scale that is kept for an optimizer, or None."""
    return _kept.get(optimizer)


_kept: weakref.WeakKeyDictionary[Any, LossScale] = weakref.WeakKeyDictionary()


def _scalar(value: float, name: str) -> tf.Variable:
    return tf.Variable(
        tf.constant(value),
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
