"""Features of a few lines each: loss scaling, clipping and XLA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.accumulation.gradients import all_finite, clipped
from tfmultigpu.accumulation.loss_scale import LossScale, make_loss_scale, unwrap_optimizer
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.features import Feature, Gradient, Replica, Rows
from tfmultigpu.strategies.collectives import refusing_to_meet


class LossScaling(Feature):
    """Multiplies the loss for float16, and skips the update of a step that is not finite.

    Skipped on all replicas, because the gradient of the global batch decides.
    """

    def __init__(self, asked: str | float | None) -> None:
        """Takes ``"dynamic"``, a number, or None to ask the optimizer."""
        self._asked = asked

    def bind(self, step: Any) -> None:
        """Takes the step, and checks what was asked for."""
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


class ClipByNorm(Feature):
    """Scales the gradient of the global batch down, so that its norm is at most a limit."""

    def __init__(self, limit: float) -> None:
        """Takes the largest norm."""
        if not 0 < limit < math.inf:
            raise ValueError(f"clip_norm is positive and finite. Received: clip_norm={limit}.")
        self._limit = limit

    def on_one_device(self) -> Feature:
        """Returns the same, which keeps nothing."""
        return self

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Clips; a gradient whose norm overflows is not valid, for clipping would make it NaN."""
        valid = gradient.valid
        if valid is not None:
            valid &= tf.math.is_finite(gradient.norm)
        tensors = clipped(list(gradient.tensors), self._limit, gradient.norm)
        return gradient._replace(tensors=tuple(tensors), valid=valid)


class CompileByXla(Feature):
    """Compiles forward and backward pass of each replica by XLA."""

    def bind(self, step: Any) -> None:
        """Takes the step, for its metrics."""
        self._step = step

    def on_one_device(self) -> Feature:
        """Returns the same: XLA draws other random numbers than TensorFlow."""
        return CompileByXla()

    def around_replica(self, replica: Replica) -> Replica:
        """Returns the function compiled, one of its own for each replica and its variables."""
        error = TfMultiGpuError(
            "XLA cannot compile what needs the other replicas, such as gather_rows or "
            "BatchNormalization(synchronized=True). Received: jit_compile=True. Leave it out."
        )

        def compiled(shard: Any, rows: Rows, state: Any, factor: Any, total: Any) -> Any:
            if not state and not tf.distribute.has_strategy():
                # On one device, read beforehand: XLA cannot read the part on another device.
                metrics = [*self._step.metrics, *getattr(self._step.model, "metrics", ())]
                known = list({id(v): v for m in metrics for v in m.variables}.values())
                self._step.trace.state = known
                state = tuple(tf.convert_to_tensor(v.value) for v in known)
            with refusing_to_meet(error):
                function = tf.function(replica, jit_compile=True, autograph=False)
                return function(shard, rows, state, factor, total)

        return compiled
