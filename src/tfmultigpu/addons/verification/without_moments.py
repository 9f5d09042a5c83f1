"""A model without the normalization of batches, so that what else depends on the cut shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import keras
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu._patch import patching
from tfmultigpu.steps.assignments import deferred_here
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.values import Rows
from tfmultigpu.types import KerasLayer

_Moments: TypeAlias = tuple[tf.Tensor, tf.Tensor]
_Call: TypeAlias = Callable[..., tf.Tensor]


class WithoutMoments(Feature):
    """Has batch normalization take 0 and 1 for the moments of its rows, and keep no statistics.

    What a layer has kept of its rows so far would not do: each replica has statistics of its own.
    """

    def on_one_device(self) -> Feature:
        """Returns the same."""
        return self

    @contextmanager
    def around_model(self, rows: Rows) -> Iterator[None]:
        """Replaces the moments, and lets go of what the layer assigns."""

        def moments(
            original: object, layer: KerasLayer, inputs: tf.Tensor, mask: object
        ) -> _Moments:
            shape = layer.moving_mean.shape
            return tf.zeros(shape, inputs.dtype), tf.ones(shape, inputs.dtype)

        def call(original: _Call, layer: KerasLayer, *args: object, **kwargs: object) -> tf.Tensor:
            scope = deferred_here()
            if scope is None:
                return original(layer, *args, **kwargs)
            with scope.repeating({}):
                return original(layer, *args, **kwargs)

        norms = keras.layers.BatchNormalization
        without = patching(*_compat.moments_of_batch(), moments)
        with without, patching(norms, "call", call):
            yield
