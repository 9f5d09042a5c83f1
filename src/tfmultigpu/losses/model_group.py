"""Several Keras models as one, for a step that trains or uses them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfmultigpu.errors import ScopeError

__all__ = ["as_model"]


def as_model(model: Any) -> Any:
    """Returns a model as it is, and a list, tuple or dict of models as one Keras model.

    Args:
        model: A Keras model or layer; or a list, tuple or dict of them.

    Raises:
        ScopeError: One of several models has no variables yet. No batch tells what it is given.
    """
    import keras

    parts = _parts(model)
    if not parts or not all(isinstance(part, keras.layers.Layer) for part in parts):
        return model
    unbuilt = [part.name for part in parts if not part.built]
    if unbuilt:
        raise ScopeError(
            "One of several models has no variables yet, and a batch does not tell what it is "
            f"given. Received: {unbuilt}. Build it inside the scope: with strategy.scope(): "
            "model.build(input_shape)."
        )
    group = keras.Model(name="_".join(part.name for part in parts))
    group.parts = parts  # Keras tracks the layers in a list.
    group.built = True
    return group


def _parts(model: Any) -> list[Any]:
    if isinstance(model, Mapping):
        return list(model.values())
    return list(model) if isinstance(model, (list, tuple)) else []


def check_variables(variables: Any, model: Any) -> tuple[Any, ...]:
    """Returns the variables to train as a tuple, each once.

    Raises:
        ValueError: One of them is not a trainable variable of the model.
    """
    known = {id(variable) for variable in model.variables}
    chosen = list({id(variable): variable for variable in variables}.values())
    strange = [variable for variable in chosen if id(variable) not in known]
    if strange or not chosen:
        received = getattr(strange[0], "path", repr(strange[0])) if strange else "no variable"
        raise ValueError(
            "variables must hold variables of the model that the step is made for. Received: "
            f"{received}. For variables of several models give all of them as the model: "
            "make_train_step([first, second], optimizer, None, forward=...)."
        )
    return tuple(chosen)
