"""Classes and functions of Keras itself, of which it is known how they work."""

from __future__ import annotations

from typing import Any

__all__ = ["is_own_class_of_keras", "is_part_of_keras"]


def is_part_of_keras(source: Any) -> bool:
    """Returns whether a class or a function is part of Keras; one derived from it is not."""
    return str(getattr(source, "__module__", "")).split(".")[0] == "keras"


def is_own_class_of_keras(optimizer: Any) -> bool:
    """Returns whether an optimizer is one of Keras' own, and no class derived from one."""
    import keras

    kind = type(optimizer)
    return getattr(keras.optimizers, kind.__name__, None) is kind
