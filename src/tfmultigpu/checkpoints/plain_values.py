"""Conversion of plain Python values to JSON and arrays, and back; for callbacks."""

from __future__ import annotations

import collections
import pathlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["NotPlainError", "needed_places", "pack", "unpack"]

# A deeper container probably contains itself.
_DEEPEST = 32
_AS_THEY_ARE = (type(None), bool, int, float, str)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_ITEMS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
# Factories of a defaultdict that are saved by name.
_FACTORIES = {one.__name__: one for one in (list, dict, set, int, float, str, bool, tuple)}


class NotPlainError(Exception):
    """Neither JSON nor arrays can hold a value."""


def pack(value: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]], depth: int = 0) -> Any:
    """Returns a value in JSON types.

    Supports numbers, strings, bools, None, NumPy arrays and scalars, tensors, variables, paths and
    random generators, and lists, tuples, sets and dicts of them.

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

    def inner(one: Any) -> Any:
        return pack(one, name, arrays, depth + 1)

    packed: Any
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [inner(one) for one in value]
    if kind in _DICTS:
        packed = {"kind": "dict", "items": [[inner(k), inner(v)] for k, v in value.items()]}
        if kind is not dict:
            packed["type"] = kind.__name__
        if kind is collections.defaultdict:
            packed["factory"] = _name_of_factory(value.default_factory)
        return packed
    if kind in _ITEMS.values():
        packed = {"kind": kind.__name__, "items": [inner(one) for one in value]}
        return packed if kind is not collections.deque else {**packed, "maxlen": value.maxlen}
    if isinstance(value, pathlib.PurePath):
        return {"kind": "path", "path": str(value)}
    state = _state_of_random(value)
    if state is not None:
        return {"kind": "random", "type": state[0], "state": inner(state[1])}
    return _pack_array(value, name, arrays)


def needed_places(packed: Any, place: str = "") -> set[str]:
    """Returns the places in a packed value that ``unpack`` cannot rebuild.

    It needs an object in these places; it creates all others.
    """
    if isinstance(packed, list):
        inner = [needed_places(one, f"{place}/{i}") for i, one in enumerate(packed)]
        return set().union(*inner)
    if not isinstance(packed, dict):
        return set()
    found = {place} if _needs_object(packed) else set()
    if packed["kind"] == "dict":
        for key, value in packed["items"]:
            found |= needed_places(value, f"{place}/{key!r}")
    elif "items" in packed:
        found |= needed_places(packed["items"], place)
    return found


def _needs_object(packed: Mapping[str, Any]) -> bool:
    if packed["kind"] == "random" and packed["type"] == "Generator":
        return _bit_generator(packed["state"]) is None
    return packed.get("factory") == "its own"


def unpack(packed: Any, arrays: Mapping[str, np.ndarray[Any, Any]], present: Any = None) -> Any:
    """Returns the value of a packed one.

    Args:
        packed: The result of ``pack``.
        arrays: The arrays that ``pack`` filled.
        present: The object now in its place. Variables, random generators, deques and subclasses
            of dict are updated in place, in containers too.

    Raises:
        ValueError: A needed object is missing; see ``needed_places``.
    """
    if isinstance(packed, list):
        return _unpack_items(packed, arrays, present if isinstance(present, list) else ())
    if not isinstance(packed, dict):
        return packed
    kind = packed["kind"]
    if kind == "dict":
        return _unpack_dict(packed, arrays, present)
    if kind in _ITEMS:
        return _unpack_sequence(packed, arrays, present)
    if kind == "path":
        return pathlib.Path(packed["path"])
    if kind == "random":
        return _unpack_random(packed, unpack(packed["state"], arrays), present)
    array = arrays[packed["array"]]
    if kind == "scalar":
        return array[()]
    if kind == "array":
        return array.copy()
    tensor = tf.cast(tf.constant(array), packed["dtype"])
    if kind == "tensor":
        return tensor
    if not hasattr(present, "assign"):
        return _new_variable(tensor, packed)
    present.assign(tensor)
    return present


def _unpack_items(packed: list[Any], arrays: Mapping[str, Any], present: Any) -> list[Any]:
    padded = [*present, *[None] * len(packed)]
    return [unpack(one, arrays, old) for one, old in zip(packed, padded, strict=False)]


def _unpack_dict(packed: Mapping[str, Any], arrays: Mapping[str, Any], present: Any) -> Any:
    old = present if type(present) in _DICTS else {}
    found = {}
    for packed_key, value in packed["items"]:
        key = unpack(packed_key, arrays)
        found[key] = unpack(value, arrays, old.get(key))
    name = packed.get("type", "dict")
    if name == "dict":
        return found
    if type(present).__name__ == name:
        present.clear()
        present.update(found)
        return present
    if name == "defaultdict":
        if packed["factory"] == "its own":
            raise ValueError("no defaultdict is present to take its default_factory from")
        return collections.defaultdict(_FACTORIES.get(packed["factory"]), found)
    return collections.Counter(found) if name == "Counter" else collections.OrderedDict(found)


def _unpack_sequence(packed: Mapping[str, Any], arrays: Mapping[str, Any], present: Any) -> Any:
    kind = packed["kind"]
    ordered = kind in ("tuple", "deque") and isinstance(present, (tuple, collections.deque))
    found = _unpack_items(packed["items"], arrays, present if ordered else ())
    if kind != "deque":
        return _ITEMS[kind](found)
    if not isinstance(present, collections.deque):
        return collections.deque(found, packed.get("maxlen"))
    present.clear()
    present.extend(found)
    return present


def _name_of_factory(factory: Any) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    return name if _FACTORIES.get(name) is factory else "its own"


def _new_variable(tensor: Any, packed: Mapping[str, Any]) -> Any:
    import keras

    if packed.get("type") == "keras":
        return keras.Variable(tensor, dtype=packed["dtype"], trainable=packed["trainable"])
    return tf.Variable(tensor, trainable=packed.get("trainable", True))


def _pack_array(value: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    packed: dict[str, Any]
    if isinstance(value, np.ndarray):
        packed, array = {"kind": "array"}, value
    elif isinstance(value, np.generic):
        packed, array = {"kind": "scalar"}, np.asarray(value)
    elif _is_variable(value):
        kept = value if isinstance(value, tf.Variable) else value.value
        _check_readable(kept)
        packed = {
            "kind": "variable",
            "type": "tf" if kept is value else "keras",
            "trainable": bool(value.trainable),
            "dtype": tf.as_dtype(value.dtype).name,
        }
        array = np.asarray(value.numpy())
    elif isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        packed = {"kind": "tensor", "dtype": value.dtype.name}
        array = np.asarray(value.numpy())
    else:
        raise NotPlainError(type(value).__name__)
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.astype("float32")  # NumPy does not know bfloat16 and similar types.
    if array.dtype.kind not in "biufcSUMm":
        raise NotPlainError(f"an array of {array.dtype}")
    packed["array"] = f"{name}/{len(arrays)}"
    # Copy it, because the value may change before it is written.
    arrays[packed["array"]] = np.array(array)
    return packed


def _check_readable(variable: Any) -> None:
    """Checks that reading a variable needs no other worker: the others may not read it."""
    strategy = getattr(variable, "distribute_strategy", None)
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    if strategy is not None and on_read:
        local = len(strategy.experimental_local_results(variable))
        if local < strategy.num_replicas_in_sync:
            raise NotPlainError("a variable that is summed over the workers when read")


def _is_variable(value: Any) -> bool:
    import keras

    return isinstance(value, (tf.Variable, keras.Variable)) and value.dtype != tf.string


def _state_of_random(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, np.random.Generator):
        return "Generator", value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return "RandomState", value.get_state(legacy=False)
    return ("Random", value.getstate()) if type(value) is random.Random else None


def _bit_generator(state: Any) -> Any:
    """Returns the NumPy class of a ``Generator`` state, packed or not; None if unknown."""
    items = dict(state["items"]) if "items" in state else state
    return getattr(np.random, items["bit_generator"], None)


def _unpack_random(packed: Mapping[str, Any], state: Any, present: Any) -> Any:
    if packed["type"] == "Generator":
        if not isinstance(present, np.random.Generator):
            make = _bit_generator(state)
            if make is None:
                raise ValueError("no random generator is present to set the state of")
            present = np.random.Generator(make())
        present.bit_generator.state = state
    elif packed["type"] == "RandomState":
        present = present if isinstance(present, np.random.RandomState) else np.random.RandomState()
        present.set_state(state)
    else:
        present = present if isinstance(present, random.Random) else random.Random()
        present.setstate(state)
    return present
