"""A gradient as it is, but rounded otherwise, which shows how much of a difference is rounding."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfmultigpu.steps.features import Feature

# So near to 1 that a gradient which depends on the scale, as one that a layer clips, is not taken
# for rounding: nearer factors change it less, and change rounding as much as before.
_FACTORS = 1.0, 1.0005, 0.9993


class OtherScale(Feature):
    """Multiplies the loss; the step divides the gradient by the same factor.

    Where many equal numbers are added, as of an average over an image, each addition rounds in the
    same direction. Weights that are moved by one rounding change little of that, another scale
    does.
    """

    def __init__(self) -> None:
        self._factor = tf.Variable(tf.ones([]), trainable=False)

    def scales(self) -> Iterator[float]:
        """Sets one factor after the other, and yields it."""
        for factor in _FACTORS:
            self._factor.assign(factor)
            yield factor

    def loss_factor(self) -> tf.Tensor:
        """Returns the factor."""
        return tf.convert_to_tensor(self._factor)
