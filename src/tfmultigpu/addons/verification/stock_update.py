"""One step of a Keras optimizer on copies of variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

__all__ = ["stock_update"]

_HIDDEN = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor")
_PLAIN = (bool, int, float, str, set, re.Pattern, type(None))


def stock_update(optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns variables after one step of the optimizer, which stays as it is.

    Args:
        optimizer: An optimizer of Keras.
        pairs: Keras variables, each with its gradient, which is clipped.

    Returns:
        Their new values; nothing if the optimizer cannot be made again with all that it has.
    """
    try:
        config = {**optimizer.get_config(), **dict.fromkeys(_HIDDEN)}
        again = type(optimizer).from_config(config)
    except (NotImplementedError, TypeError, ValueError):  # A schedule of the user's.
        return []
    copies = [_copy(variable) for variable, _ in pairs]
    again.build(copies)
    slots = {slot.path: slot for slot in optimizer.variables}
    # Adafactor has several slots of one path. Exclusions from weight decay are in no config.
    known = len(slots) == len(optimizer.variables) and _settings(again) == _settings(optimizer)
    if not known or any(slot.path not in slots for slot in again.variables):
        return []
    for slot in again.variables:
        slot.assign(slots[slot.path].numpy())
    again.apply([tf.convert_to_tensor(gradient) for _, gradient in pairs], copies)
    return [copy.numpy() for copy in copies]


def _copy(variable: Any) -> Any:
    """A copy of the same path, from which an optimizer makes the names of its slots."""
    import keras

    *scopes, name = variable.path.split("/")
    with ExitStack() as contexts:
        for scope in scopes:
            contexts.enter_context(keras.name_scope(scope))
        copy = keras.Variable(variable.numpy(), dtype=variable.dtype, name=name)
    copy.constraint = getattr(variable, "constraint", None)
    return copy


def _settings(optimizer: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, _PLAIN) and name not in _HIDDEN and not name.startswith("_self_")
    }
