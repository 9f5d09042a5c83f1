"""State that layers change by themselves when they are called, and what replicas make of it."""

from __future__ import annotations

from typing import Any

from tfmultigpu.strategies.scopes import all_layers

__all__ = ["assigned_in_each_pass", "may_be_assigned"]


def assigned_in_each_pass(model: Any) -> list[Any]:
    """Returns variables that a forward pass computes anew from themselves, Keras variables.

    ``SpectralNormalization`` divides its kernel by an estimate that each pass in training improves.
    Micro-batches must all begin with the same values, or one step would do that several times.
    """
    import keras

    return [
        variable
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
        for variable in (layer.vector_u, layer.kernel)
    ]


def may_be_assigned(model: Any) -> list[Any]:
    """Returns the variables that layers are most likely to assign, Keras variables: no weights."""
    frozen = {id(v) for layer in all_layers(model) if not layer.trainable for v in layer.weights}
    return [v for v in model.non_trainable_variables if id(v) not in frozen]
