"""Clipping: the gradient of the global batch is scaled down to a largest norm, once."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.accumulation.gradients import clipped
from tfmultigpu.arguments import check_positive
from tfmultigpu.steps.features.feature import Feature
from tfmultigpu.steps.values import Gradient


class ClipByNorm(Feature):
    """Scales the gradient of the global batch down, so that its norm is at most a limit."""

    takes_lists = True

    def __init__(self, limit: float) -> None:
        self._limit = check_positive("clip_norm", limit, "To clip nothing, leave clip_norm out.")

    def on_one_device(self) -> Feature:
        """Returns the same, which keeps nothing."""
        return self

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Clips; a gradient whose norm overflows is not valid, for clipping would make it NaN."""
        tensors = clipped(list(gradient.tensors), self._limit, gradient.norm)
        gradient = gradient._replace(tensors=tuple(tensors))
        if gradient.finite is None:
            return gradient
        finite = gradient.finite & tf.math.is_finite(gradient.norm)
        return gradient._replace(valid=finite, finite=finite)
