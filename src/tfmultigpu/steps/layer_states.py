"""State that layers change by themselves when they are called."""

from __future__ import annotations

from typing import Any

from tfmultigpu.strategies.scopes import all_layers

__all__ = ["assigned_in_each_pass"]


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
