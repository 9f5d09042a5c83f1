"""Loss scaling for float16: one verdict about the global gradient, the same on every replica."""

from __future__ import annotations

import math
import weakref
from typing import Any, Protocol

import tensorflow as tf

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "kept_loss_scale",
    "make_loss_scale",
    "unwrap_optimizer",
]

INITIAL_SCALE = 2.0**15
GROWTH_STEPS = 2000


class LossScale(Protocol):
    """What losses are multiplied by before the backward pass, and gradients divided by after it."""

    def value(self) -> Any:
        """Returns the scale for the next step, a float32 scalar."""

    def update(self, finite: Any) -> None:
        """Takes note of whether the global gradient was finite; cross-replica context."""


class FixedLossScale:
    """A constant scale; a step whose gradient is not finite is skipped.

    Attributes:
        scale: The scale, positive.
    """

    def __init__(self, scale: float) -> None:
        """Takes the scale."""
        if isinstance(scale, bool) or not 0 < scale < math.inf:
            raise ValueError(f"A loss scale is positive and finite. Received: loss_scale={scale}.")
        self.scale = float(scale)

    def value(self) -> Any:
        """Returns the scale, a float32 scalar."""
        return tf.constant(self.scale)

    def update(self, finite: Any) -> None:
        """Changes nothing."""


class DynamicLossScale:
    """A scale that halves when a gradient overflows and doubles after a run of good steps.

    The rule and its constants are those of ``keras.optimizers.LossScaleOptimizer``; the scale never
    falls below 1.

    Attributes:
        scale: The scale, a float32 variable.
        good_steps: Steps with a finite gradient since the scale last changed, an integer variable.
        growth_steps: Good steps after which the scale doubles.
    """

    def __init__(self, scale: Any, good_steps: Any, growth_steps: int = GROWTH_STEPS) -> None:
        """Takes the variables that hold its state."""
        self.scale = scale
        self.good_steps = good_steps
        self.growth_steps = growth_steps

    def value(self) -> Any:
        """Returns the scale for the next step, a float32 scalar."""
        return tf.convert_to_tensor(self.scale)

    def update(self, finite: Any) -> None:
        """Halves, doubles or keeps the scale; cross-replica context."""
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
    """Returns the loss scale for a training step.

    Args:
        loss_scale: None, ``"dynamic"`` or a positive number. A number set as
            ``optimizer.loss_scale_factor`` counts as if given here.
        optimizer: A built optimizer. A ``keras.optimizers.LossScaleOptimizer`` asks for dynamic
            scaling, and its own variables then hold the state, so that they are saved with it. For
            any other the state is kept as long as it lives: another step of it goes on with that.
        strategy: Where the state is created.

    Raises:
        ValueError: ``loss_scale`` is none of these, or contradicts the optimizer.
    """
    wrapped = unwrap_optimizer(optimizer) is not optimizer
    asked = optimizer.loss_scale_factor if loss_scale is None and not wrapped else loss_scale
    if wrapped:
        if asked not in (None, "dynamic"):
            raise ValueError(
                "A LossScaleOptimizer scales dynamically. Received: "
                f"loss_scale={loss_scale!r} beside it. Leave one of them out."
            )
        return DynamicLossScale(
            optimizer.dynamic_scale.value,
            optimizer.step_counter.value,
            optimizer.dynamic_growth_steps,
        )
    if asked is None:
        return None
    if asked == "dynamic":
        if optimizer not in _kept:
            _kept[optimizer] = _begin(strategy)
        return _kept[optimizer]
    if isinstance(asked, str):
        raise ValueError(
            f"loss_scale is None, 'dynamic' or a number. Received: loss_scale={loss_scale!r}."
        )
    return FixedLossScale(asked)


def kept_loss_scale(optimizer: Any) -> LossScale | None:
    """Returns the dynamic loss scale that is kept for an optimizer; None where there is none."""
    return _kept.get(optimizer)


def _begin(strategy: tf.distribute.Strategy) -> DynamicLossScale:
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    with strategy.scope():
        scale = tf.Variable(
            tf.constant(INITIAL_SCALE), trainable=False, name="loss_scale", aggregation=first
        )
        good = tf.Variable(tf.constant(0), trainable=False, name="good_steps", aggregation=first)
    return DynamicLossScale(scale, good)


_kept: weakref.WeakKeyDictionary[Any, DynamicLossScale] = weakref.WeakKeyDictionary()
