"""Layers inside a model, the masks of their outputs, and whether Keras defines a class."""

from __future__ import annotations

from tfmultigpu.types import KerasLayer, KerasModel, KerasVariable, Tensor

_MASK = "_keras_mask"


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Returns the mask that Keras layers attached to a tensor, or None.

    Private: ``tensor._keras_mask``. The public ``layer.compute_mask`` would walk through the layers
    again. Without it a masked loss would divide by every element.
    """
    return getattr(tensor, _MASK, None)


def set_keras_mask(tensor: Tensor, mask: Tensor) -> None:
    """Attaches a mask to a tensor, as Keras layers do; private as above."""
    setattr(tensor, _MASK, mask)


def layers_inside(model: KerasModel) -> list[KerasLayer]:
    """Returns every layer inside a model or layer.

    Private: ``layer._flatten_layers``. The public ``model.layers`` leaves out the layers inside a
    user-defined layer, which is all that is seen without it.
    """
    if not hasattr(model, "_flatten_layers"):
        return list(getattr(model, "layers", ()))
    return list(model._flatten_layers(include_self=False))


def own_variables(layer: KerasLayer) -> list[KerasVariable]:
    """Returns the variables of a layer itself, its seeds too, without the variables of its layers.

    Private: the lists of a layer. ``layer.variables`` visits all layers inside each time, and a
    step asks at each call; without the lists it would.
    """
    seeds = [generator.state for generator in getattr(layer, "_seed_generators", ())]
    if not hasattr(layer, "_trainable_variables"):
        return list(layer.variables)
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def is_part_of_keras(source: object) -> bool:
    """Returns whether Keras itself defines a class or a function."""
    return str(getattr(source, "__module__", "")).split(".")[0] == "keras"
