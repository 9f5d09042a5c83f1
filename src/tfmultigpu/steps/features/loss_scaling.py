"""Loss scaling: the loss is multiplied for float16, and steps that overflow are skipped."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfmultigpu.accumulation.gradients import all_finite
from tfmultigpu.accumulation.loss_scale import LossScale, make_loss_scale, unwrap_optimizer
from tfmultigpu.errors import PrecisionWarning
from tfmultigpu.steps.features.feature import BoundStep, Feature
from tfmultigpu.steps.values import Gradient
from tfmultigpu.strategies.scopes import all_layers
from tfmultigpu.types import KerasLayer, KerasModel, KerasVariable, Scalar
from tfmultigpu.user_code import warn


class LossScaling(Feature):
    """Multiplies the loss for float16, and skips the update of a step that is not finite.

    Skipped on all replicas, because the gradient of the global batch decides.
    """

    takes_lists = True

    def __init__(self, asked: str | float | None, *, warns: bool = True) -> None:
        self._asked, self._warns = asked, warns  # None: as the optimizer says.

    def bind(self, step: BoundStep) -> None:
        """Keeps the parts of the step, and checks what was asked for."""
        self._model, self._optimizer, self._strategy = step.model, step.optimizer, step.strategy
        wraps = unwrap_optimizer(step.optimizer) is not step.optimizer
        if not wraps or step.optimizer.built or self._asked not in (None, "dynamic"):
            self.scale()

    def on_one_device(self) -> Feature:
        """Returns the same: what float16 rounds to zero or skips depends on the scale."""
        return LossScaling(self._asked, warns=False)

    def scale(self) -> LossScale | None:
        """Returns the scale; a dynamic one is kept as long as the optimizer."""
        with tf.init_scope():
            return make_loss_scale(self._asked, self._optimizer, self._strategy)

    @property
    def variables(self) -> Sequence[KerasVariable]:  # type: ignore[override]
        """The state of a dynamic scale."""
        return scale.variables if (scale := self.scale()) else []

    def loss_factor(self) -> Scalar:
        """Returns the scale; warns, once, of a model in float16 without one."""
        if scale := self.scale():
            return scale.value()
        if self._warns:  # The model is built by now, and no step is lost.
            _warn_of_float16(self._model)
            self._warns = False  # Not before: it may be an error, which stops the next step, too.
        return None

    def on_gradient(self, gradient: Gradient) -> Gradient:
        """Forbids the update if a number is not finite."""
        if self.scale() is None:
            return gradient
        finite = all_finite(list(gradient.tensors))
        return gradient._replace(valid=finite, finite=finite)

    def after_update(self, gradient: Gradient) -> None:
        """Halves or doubles the scale, whatever else forbids the update."""
        if scale := self.scale():
            scale.update(tf.identity(gradient.finite))


def _warn_of_float16(model: KerasModel) -> None:
    names = [layer.name for layer in all_layers(model) if _computes_in_float16(layer)]
    if names:
        warn(
            "The model computes in float16 without a loss scale. Received: loss_scale=None, and "
            f"layers in float16, such as {names[-1]!r}. Small gradients become zero in it, so "
            'that weights stop training without an error. Write loss_scale="dynamic", or use the '
            'dtype policy "mixed_bfloat16".',
            PrecisionWarning,
        )


def _computes_in_float16(layer: KerasLayer) -> bool:
    # The policy of an input is the one that was set when it was made, and says nothing.
    return layer.compute_dtype == "float16" and not isinstance(layer, keras.layers.InputLayer)
