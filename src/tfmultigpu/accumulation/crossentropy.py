"""Keras' loss ``"crossentropy"``: which of three it is, the shapes of a batch tell."""

from __future__ import annotations

import functools

from tfmultigpu.types import Function, KerasLoss, Tensor

NAMES = ("crossentropy", "ce")


def crossentropy(name: str) -> KerasLoss:
    """Returns the loss that ``model.compile`` chooses for a name of ``NAMES``.

    Keras knows the name in ``compile`` alone, where it has the labels and the predictions.
    """
    return _loss_by_shapes()(name=name)


@functools.cache
def _loss_by_shapes() -> type[KerasLoss]:
    """Returns the class of the loss; Keras is imported where it is used."""
    from keras import losses

    class Crossentropy(losses.Loss):  # type: ignore[misc]
        """The binary, sparse categorical or categorical crossentropy."""

        def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
            are_numbers = len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1
            chosen: Function = losses.categorical_crossentropy
            if y_pred.shape[-1] == 1:
                chosen = losses.binary_crossentropy
            elif are_numbers:
                chosen = losses.sparse_categorical_crossentropy
            # Keras' wrapper of a function, which brings labels and predictions to one rank.
            return losses.MeanSquaredError.__base__(chosen, name=self.name).call(y_true, y_pred)

    return Crossentropy
