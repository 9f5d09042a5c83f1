"""Conversion of plain Python values to JSON and arrays, and back; for callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["NotPlainError", "pack", "unpack"]

# A deeper container probably contains itself.
_DEEPEST = 32
_AS_THEY_ARE = (type(None), bool, int, float, str)


class NotPlainError(Exception):
    """Neither JSON nor arrays can hold a value."""


def pack(value: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]], depth: int = 0) -> Any:
    """Returns a value in JSON types.

    Supports numbers, strings, bools, None, NumPy arrays and scalars, and lists, tuples and dicts
    of them.

    Args:
        value: The value.
        name: The prefix for the names of its arrays.
        arrays: Receives its arrays.
        depth: The number of containers around it.

    Raises:
        NotPlainError: The value, or a value inside it, is of another kind.
    """
    if depth > _DEEPEST:
        raise NotPlainError("containers nested too deeply")

    def inner(item: Any) -> Any:
        return pack(item, name, arrays, depth + 1)

    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [inner(item) for item in value]
    if kind is tuple:
        return {"kind": "tuple", "items": [inner(item) for item in value]}
    if kind is dict:
        return {"kind": "dict", "items": [[inner(k), inner(v)] for k, v in value.items()]}
    if not isinstance(value, (np.ndarray, np.generic)):
        raise NotPlainError(kind.__name__)
    array = np.asarray(value)
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.astype("float32")  # NumPy does not know bfloat16 and similar types.
    if array.dtype.kind not in "biufcSUMm":
        raise NotPlainError(f"an array of {array.dtype}")
    place = f"{name}/{len(arrays)}"
    # Copy it, because the value may change before it is written.
    arrays[place] = np.array(array)
    return {"kind": "array" if isinstance(value, np.ndarray) else "scalar", "array": place}


def unpack(packed: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Returns the value of a packed one.

    Args:
        packed: The result of ``pack``.
        arrays: The arrays that ``pack`` filled.
    """
    if isinstance(packed, list):
        return [unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if packed["kind"] == "tuple":
        return tuple(unpack(item, arrays) for item in packed["items"])
    if packed["kind"] == "dict":
        return {unpack(k, arrays): unpack(v, arrays) for k, v in packed["items"]}
    array = arrays[packed["array"]]
    return array[()] if packed["kind"] == "scalar" else array.copy()
