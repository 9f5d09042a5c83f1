"""Loss scaling: the loss is multiplied for float16, and steps that overflow are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import all_finite
from tfmultigpu.accumulation.loss_scale import LossScale, make_loss_scale, unwrap_optimizer
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.values import Gradient


class LossScaling(Feature):
    """Multiplies the loss for float16, and skips the update of a step that is not finite.

    Skipped on all replicas, because the gradient of the global batch decides.
    """

    def __init__(self, asked: str | float | None) -> None:
        self._asked = asked  # None: as the optimizer says.

    def bind(self, step: BoundStep) -> None:
        """Keeps optimizer and strategy, and checks what was asked for."""
        self._optimizer, self._strategy = step.optimizer, step.strategy
        wraps = unwrap_optimizer(step.optimizer) is not step.optimizer
        if not wraps or step.optimizer.built or self._asked not in (None, "dynamic"):
            self.scale()

    def on_one_device(self) -> Feature:
        """Returns the same: what float16 rounds to zero or skips depends on the scale."""
        return LossScaling(self._asked)

    def scale(self) -> LossScale | None:
        """Returns the scale; a dynamic one is kept as long as the optimizer."""
        with tf.init_scope():
            return make_loss_scale(self._asked, self._optimizer, self._strategy)

    @property
    def variables(self) -> Sequence[Any]:  # type: ignore[override]
        """The state of a dynamic scale."""
        return scale.variables if (scale := self.scale()) else []

    def loss_factor(self) -> Any:
        """Returns the scale."""
        return scale.value() if (scale := self.scale()) else None

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Forbids the update if a number is not finite."""
        if self.scale() is None:
            return gradient
        return gradient._replace(valid=all_finite(list(gradient.tensors)))

    def after_update(self, gradient: Gradient) -> None:
        """Halves or doubles the scale."""
        if scale := self.scale():
            scale.update(tf.identity(gradient.valid))
