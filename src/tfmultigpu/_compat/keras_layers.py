"""Layers inside a model, how they are called, their masks, and whether Keras defines a class."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfmultigpu.types import KerasLayer, KerasModel, KerasVariable, Tensor

_MASK = "_keras_mask"
_CALL = "current_call_ctx"


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Returns the mask that Keras layers attached to a tensor, or None.

    Private: ``tensor._keras_mask``. The public ``layer.compute_mask`` would walk through the layers
    again. Without it a masked loss would divide by every element.
    """
    return getattr(tensor, _MASK, None)


def set_keras_mask(tensor: Tensor, mask: Tensor) -> None:
    """Attaches a mask to a tensor, as Keras layers do; private as above."""
    setattr(tensor, _MASK, mask)


def layer_call() -> Any:
    """Returns what a layer that is called now hands down to layers inside it: whether it trains.

    Private: ``keras.src.backend.common.global_state``, in which the outermost call of a layer keeps
    it. From Keras 3.16 on layers do not pass ``training`` on in any other way. Without it the
    layers of a rematerialized model are computed again as in a prediction.
    """
    from keras.src.backend.common import global_state

    return copy.copy(global_state.get_global_attribute(_CALL))


@contextmanager
def inside_layer_call(call: Any) -> Iterator[None]:
    """Has layers called as inside an earlier call, of ``layer_call``; private as above."""
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute(_CALL)
    global_state.set_global_attribute(_CALL, call)
    try:
        yield
    finally:
        global_state.set_global_attribute(_CALL, before)


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
    state: Any = pkgutil.resolve_name("keras.src.backend.common.global_state")
    state.set_global_attribute("uninitialized_variables", [])


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
