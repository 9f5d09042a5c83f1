"""Keras' loss ``"crossentropy"``: which of three it is, the shapes of a batch tell."""

from __future__ import annotations

from typing import Any

import keras

NAMES = ("crossentropy", "ce")


class Crossentropy(keras.losses.Loss):  # type: ignore[misc]
    """The binary, sparse categorical or categorical crossentropy, as ``model.compile`` chooses.

    Keras knows this name in ``compile`` alone, where it has the labels and the predictions.
    """

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the values of the one that fits the labels and predictions."""
        losses, classes = keras.losses, y_pred.shape[-1]
        are_numbers = len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1
        chosen: Any = losses.categorical_crossentropy
        if classes == 1:
            chosen = losses.binary_crossentropy
        elif are_numbers:
            chosen = losses.sparse_categorical_crossentropy
        # Keras' wrapper of a function, which brings labels and predictions to one rank.
        return losses.MeanSquaredError.__base__(chosen, name=self.name).call(y_true, y_pred)
