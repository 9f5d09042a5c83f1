"""Plain Python values as JSON and arrays, and back: what callbacks remember."""

from __future__ import annotations

import collections
import pathlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["NotPlainError", "pack", "unpack"]

# Deeper ones contain themselves, or are no state that anybody wrote down by hand.
_DEEPEST = 32
_AS_THEY_ARE = (type(None), bool, int, float, str)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_ITEMS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


class NotPlainError(Exception):
    """A value is of a kind that neither JSON nor arrays can hold."""


def pack(value: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]], depth: int = 0) -> Any:
    """Returns a value as JSON can hold it.

    Numbers, strings, bools and None, lists, tuples, sets and dicts of them, NumPy arrays and
    scalars, tensors, variables, paths and generators of random numbers.

    Args:
        value: The value.
        name: Where its arrays go: the beginning of their names.
        arrays: Its arrays are added here.
        depth: In how many containers it lies.

    Raises:
        NotPlainError: It is something else, or contains something else.
    """
    if depth > _DEEPEST:
        raise NotPlainError("containers nested too deeply")

    def inner(one: Any) -> Any:
        return pack(one, name, arrays, depth + 1)

    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [inner(one) for one in value]
    if kind in _DICTS:
        return {"kind": "dict", "items": [[inner(k), inner(v)] for k, v in value.items()]}
    if kind in _ITEMS.values():
        return {"kind": kind.__name__, "items": [inner(one) for one in value]}
    if isinstance(value, pathlib.PurePath):
        return {"kind": "path", "path": str(value)}
    state = _state_of_random(value)
    if state is not None:
        return {"kind": "random", "state": inner(state)}
    return _pack_array(value, name, arrays)


def unpack(packed: Any, arrays: Mapping[str, np.ndarray[Any, Any]], present: Any = None) -> Any:
    """Returns the value that was packed.

    Args:
        packed: What ``pack`` returned.
        arrays: The arrays it filled.
        present: What is in its place now. Variables, generators of random numbers, deques and
            dicts of other kinds are changed, not replaced.

    Raises:
        ValueError: There is nothing to change.
    """
    if isinstance(packed, list):
        return [unpack(one, arrays) for one in packed]
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind == "dict":
        found = {unpack(k, arrays): unpack(v, arrays) for k, v in packed["items"]}
        if type(present) in _DICTS[1:]:
            present.clear()
            present.update(found)
            return present
        return found
    if kind == "deque" and isinstance(present, collections.deque):
        present.clear()
        present.extend(unpack(one, arrays) for one in packed["items"])
        return present
    if kind in _ITEMS:
        return _ITEMS[kind](unpack(one, arrays) for one in packed["items"])
    if kind == "path":
        return pathlib.Path(packed["path"])
    if kind == "random":
        _set_state_of_random(present, unpack(packed["state"], arrays))
        return present
    array = arrays[packed["array"]]
    if kind == "scalar":
        return array[()]
    if kind == "array":
        return array.copy()
    if kind == "tensor":
        return tf.cast(tf.constant(array), packed["dtype"])
    if kind == "variable" and hasattr(present, "assign"):
        present.assign(tf.cast(tf.constant(array), packed["dtype"]))
        return present
    raise ValueError(f"Nothing here takes a value of kind {kind!r}.")


def _pack_array(value: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    packed: dict[str, Any]
    if isinstance(value, np.ndarray):
        packed, array = {"kind": "array"}, value
    elif isinstance(value, np.generic):
        packed, array = {"kind": "scalar"}, np.asarray(value)
    elif _is_variable(value):
        packed = {"kind": "variable", "dtype": tf.as_dtype(value.dtype).name}
        array = np.asarray(value.numpy())
    elif isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        packed = {"kind": "tensor", "dtype": value.dtype.name}
        array = np.asarray(value.numpy())
    else:
        raise NotPlainError(type(value).__name__)
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.astype("float32")  # Types that NumPy does not know, such as bfloat16.
    if array.dtype.kind not in "biufcSUMm":
        raise NotPlainError(f"an array of {array.dtype}")
    packed["array"] = f"{name}/{len(arrays)}"
    # A copy: by the time it is written the value may be another.
    arrays[packed["array"]] = np.array(array)
    return packed


def _is_variable(value: Any) -> bool:
    import keras

    return isinstance(value, (tf.Variable, keras.Variable)) and value.dtype != tf.string


def _state_of_random(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if type(value) is random.Random:
        return value.getstate()
    return None


def _set_state_of_random(present: Any, state: Any) -> None:
    if isinstance(present, np.random.Generator):
        present.bit_generator.state = state
    elif isinstance(present, np.random.RandomState):
        present.set_state(state)
    elif isinstance(present, random.Random):
        present.setstate(state)
    else:
        raise ValueError("There is no generator of random numbers to set.")
