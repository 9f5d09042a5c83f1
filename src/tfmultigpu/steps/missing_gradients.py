"""Variables that no gradient reaches: Keras' error, or its warning, once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tfmultigpu.errors import LossError
from tfmultigpu.steps.callers import stack_level_of_user

__all__ = ["MissingGradients"]


class MissingGradients:
    """Says of each variable once that no gradient reaches it."""

    def __init__(self) -> None:
        """Has said nothing yet."""
        self._said: set[str] = set()
        self._has_nothing_to_train = False

    def trained(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Returns the variables that have a gradient.

        Args:
            variables: Keras variables.
            gradients: The gradient of each for the global batch, or None.

        Raises:
            LossError: No variable has one.
        """
        pairs = list(zip(variables, gradients, strict=True))
        without = [variable.path for variable, gradient in pairs if gradient is None]
        if pairs and len(without) == len(pairs):
            raise LossError(
                "No gradient reaches any trainable variable, so no step would change anything. "
                f"Received: variables {without[:5]}. Compute the loss from the model's outputs by "
                "operations that have a gradient: not by tf.stop_gradient, tf.argmax, tf.round, "
                "a cast to integers or numpy."
            )
        new = [path for path in without if path not in self._said]
        self._said.update(new)
        if new:
            warnings.warn(
                "No gradient reaches some trainable variables, so they stay as they are. Received: "
                f"variables {new[:5]}. Look for an output without a loss or a tf.stop_gradient; if "
                "it is meant, write layer.trainable = False.",
                stacklevel=stack_level_of_user(),
            )
        if not pairs and not self._has_nothing_to_train:
            self._has_nothing_to_train = True
            warnings.warn(
                "The model has no trainable variables, so a step computes the loss and changes "
                "nothing. Write layer.trainable = True for the layers to train.",
                stacklevel=stack_level_of_user(),
            )
        return [variable for variable, gradient in pairs if gradient is not None]
