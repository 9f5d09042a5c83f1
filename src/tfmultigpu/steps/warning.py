"""Warnings that name the line of the user, and those of variables that no gradient reaches."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import LossError

_ROOT = Path(__file__).parents[1]


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user: the innermost that is in no package on the way here.

    That is neither this package nor TensorFlow nor Keras, whose loop calls a step under ``fit``.
    ``warnings.warn(skip_file_prefixes=)`` does the same from Python 3.12 on.
    """
    import keras

    packages = (_ROOT, Path(tf.__file__).parent, Path(keras.__file__).parent)
    prefixes = tuple(str(package) for package in packages)
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class MissingGradients:
    """Says of each variable once that no gradient reaches it."""

    def __init__(self) -> None:
        """Has said nothing yet."""
        self._said: set[str] = set()

    def updated(self, variables: list[Any], gradients: list[Any]) -> list[int]:
        """Returns the numbers of the variables that have a gradient."""
        without = [v.path for v, g in zip(variables, gradients, strict=True) if g is None]
        if variables and len(without) == len(variables):
            raise LossError(
                "No gradient reaches any trainable variable, so no step would change anything. "
                f"Received: variables {without[:5]}. Compute the loss from the model's outputs by "
                "operations that have a gradient: not by tf.stop_gradient, tf.argmax, tf.round, "
                "a cast to integers or numpy."
            )
        if new := [path for path in without if path not in self._said]:
            self._said.update(new)
            warn(
                "No gradient reaches some trainable variables, so they stay as they are. Received: "
                f"variables {new[:5]}. Look for an output without a loss or a tf.stop_gradient; if "
                "it is meant, write layer.trainable = False."
            )
        if not variables and "" not in self._said:
            self._said.add("")
            warn(
                "The model has no trainable variables, so a step computes the loss and changes "
                "nothing. Write layer.trainable = True for the layers to train."
            )
        return [i for i, gradient in enumerate(gradients) if gradient is not None]
