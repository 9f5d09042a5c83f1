"""State of callbacks: read when a run is saved, restored when it resumes."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.addons.checkpoints.files import Arrays
from tfmultigpu.errors import CheckpointError

__all__ = ["CallbackStates"]

_log = logging.getLogger("tfmultigpu")

_SET_BY_KERAS = {"params", "_model", "model"}
# Attributes of TensorBoard that describe this process: its profiler and its files.
_OF_THIS_PROCESS = {"_is_tracing", "_profiler_started", "_should_write_train_graph"}
# A deeper container probably contains itself.
_DEEPEST = 32


class CallbackStates:
    """State of a list of callbacks.

    A callback may define ``state()`` and ``set_state(value)``. Otherwise its state is each plain
    attribute that training has changed. Arguments of a Keras constructor are not state: a run
    resumed with a new ``patience`` uses it.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        """Records the attributes of callbacks; call it before ``on_train_begin``."""
        seen: dict[tuple[str, str], int] = {}
        self._callbacks: dict[tuple[str, str, int], Any] = {}
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            key = type(callback).__name__, monitor if isinstance(monitor, str) else ""
            if not _is_of_this_library(callback):
                seen[key] = number = seen.get(key, -1) + 1
                self._callbacks[key[0], key[1], number] = callback
        self._before = [
            {name: _digest(value) for name, value in _attributes(callback).items()}
            for callback in self._callbacks.values()
        ]
        self._named: set[str] = set()

    def read(self, arrays: dict[str, np.ndarray[Any, Any]], model: Any) -> list[dict[str, Any]]:
        """Returns the state of each callback in JSON types, and adds its arrays to ``arrays``."""
        states: list[dict[str, Any]] = []
        unsaved: list[str] = []
        for i, (key, callback) in enumerate(self._callbacks.items()):
            place = f"fit/callbacks/{i}"
            if _has_methods(callback):
                try:
                    state = {"state": _pack(callback.state(), place, arrays)}
                except _NotPlainError as error:
                    raise CheckpointError(
                        "The state of a callback cannot be saved. Received: "
                        f"{key[0]}.state() returned {error}. Return numbers, strings, arrays, or "
                        "lists and dicts of them."
                    ) from None
            else:
                state = {"attributes": {}}
                for name, value in _attributes(callback).items():
                    digest = _digest(value)
                    if digest is None:
                        if not is_part_of_keras(type(callback)) and not _is_no_state(value, model):
                            unsaved.append(f"{key[0]}.{name} ({type(value).__name__})")
                    elif digest != self._before[i].get(name):
                        state["attributes"][name] = _pack(value, f"{place}/{name}", arrays)
            states.append({"key": list(key), **state})
        if new := [place for place in unsaved if place not in self._named]:
            self._named.update(new)
            _log.warning(
                "Checkpoints cannot save these attributes of callbacks: %s. A resumed run starts "
                "with new ones. Write state(), which returns numbers, strings, arrays, or lists "
                "and dicts of them, and set_state(value) in the callback.",
                ", ".join(new),
            )
        return states

    def write(self, stored: Sequence[Mapping[str, Any]], arrays: Arrays) -> None:
        """Restores the stored states; callbacks without one keep their values."""
        for state in stored:
            callback = self._match(state)
            try:
                if callback is not None and "state" in state:
                    callback.set_state(_unpack(state["state"], arrays))
                elif callback is not None:
                    for name, packed in state["attributes"].items():
                        setattr(callback, name, _unpack(packed, arrays))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"A callback rejected its saved state. Received: callback {state['key'][0]}, "
                    f"{type(error).__name__}: {error}. Pass the callback that the checkpoint was "
                    "saved with, or leave it out to resume without its state."
                ) from error

    def missing(self, stored: Sequence[Mapping[str, Any]], *, with_state: bool) -> list[str]:
        """Returns the names of stored callbacks, or of those with a state, that are not here."""
        return [
            state["key"][0]
            for state in stored
            if self._match(state) is None
            and (not with_state or "state" in state or state["attributes"])
        ]

    def _match(self, state: Mapping[str, Any]) -> Any:
        """Returns the callback of a state, by class, monitored metric and order; or None."""
        callback = self._callbacks.get(tuple(state["key"]))
        return callback if _has_methods(callback) == ("state" in state) else None


def _is_of_this_library(callback: Any) -> bool:
    """Returns whether ``fit`` made a callback itself: it has no state to save."""
    import keras

    module = type(callback).__module__
    return module.startswith("tfmultigpu.") or isinstance(callback, keras.callbacks.ProgbarLogger)


def _has_methods(callback: Any) -> bool:
    return all(callable(getattr(type(callback), name, None)) for name in ("state", "set_state"))


def _attributes(callback: Any) -> dict[str, Any]:
    """Returns the attributes that are not arguments of a Keras constructor."""
    import keras

    if _has_methods(callback):
        return {}
    skipped = _SET_BY_KERAS | {
        name
        for kind in type(callback).__mro__
        if is_part_of_keras(kind) and "__init__" in vars(kind)
        for name in inspect.signature(vars(kind)["__init__"]).parameters
    }
    if isinstance(callback, keras.callbacks.TensorBoard):
        skipped |= _OF_THIS_PROCESS
    return {name: value for name, value in vars(callback).items() if name not in skipped}


def _is_no_state(value: Any, model: Any) -> bool:
    """Returns whether a value is a function, or is saved with the model."""
    if type(value) in (list, tuple):
        return all(_is_no_state(item, model) for item in value)
    saved = [*model.variables, *getattr(model.optimizer, "variables", ())]
    known = {id(part) for variable in saved for part in (variable, variable.value)}
    variables = getattr(value, "variables", None)
    if variables is None:
        return callable(value) or id(value) in known
    return all(id(variable) in known for variable in variables)


class _NotPlainError(Exception):
    """Neither JSON nor arrays can hold a value."""


def _pack(value: Any, place: str, arrays: dict[str, np.ndarray[Any, Any]], depth: int = 0) -> Any:
    """Returns a plain value in JSON types; its arrays go to ``arrays``.

    Plain are numbers, strings, bools, None, NumPy arrays and scalars, and lists, tuples and dicts
    of them.
    """
    if depth > _DEEPEST:
        raise _NotPlainError("containers nested too deeply")

    def inner(items: Any) -> list[Any]:
        return [_pack(item, place, arrays, depth + 1) for item in items]

    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return inner(value)
    if kind is tuple:
        return {"kind": "tuple", "items": inner(value)}
    if kind is dict:
        return {"kind": "dict", "items": inner(value.items())}
    array = np.array(value) if isinstance(value, (np.ndarray, np.generic)) else np.array(None)
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.astype("float32")  # NumPy does not know bfloat16 and similar types.
    if array.dtype.kind not in "biufcSUMm":
        raise _NotPlainError(kind.__name__)
    name = f"{place}/{len(arrays)}"
    arrays[name] = array
    return {"kind": "array" if isinstance(value, np.ndarray) else "scalar", "array": name}


def _unpack(packed: Any, arrays: Arrays) -> Any:
    """Returns the value of a packed one."""
    if isinstance(packed, list):
        return [_unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if packed["kind"] == "tuple":
        return tuple(_unpack(packed["items"], arrays))
    if packed["kind"] == "dict":
        return dict(_unpack(packed["items"], arrays))
    array = arrays[packed["array"]]
    return array[()] if packed["kind"] == "scalar" else array.copy()


def _digest(value: Any) -> str | None:
    """Returns a hash of a plain value; None if it is not plain."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    try:
        packed = _pack(value, "", arrays)
    except _NotPlainError:
        return None
    digest = hashlib.sha256(json.dumps(packed).encode())
    for array in arrays.values():
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
