"""Layers inside a model, the masks of their outputs, and whether Keras defines a class."""

from __future__ import annotations

import pkgutil

from tfmultigpu.types import KerasLayer, KerasModel, Tensor, Untyped

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


def forget_empty_variables() -> None:
    """Has Keras forget the variables that it could not create, when one of them has failed.

    Private: the global attribute ``uninitialized_variables``. Keras would try them again with each
    later model, and fail again. The public ``keras.utils.clear_session`` forgets all names too.
    """
    state: Untyped = pkgutil.resolve_name("keras.src.backend.common.global_state")
    state.set_global_attribute("uninitialized_variables", [])


def is_part_of_keras(source: object) -> bool:
    """Returns whether Keras itself defines a class or a function."""
    return str(getattr(source, "__module__", "")).split(".")[0] == "keras"
