"""State of callbacks: read when a run is saved, restored when it resumes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.addons.checkpoints.files import Arrays
from tfmultigpu.errors import CheckpointError

_log = logging.getLogger("tfmultigpu")

# Keras sets the first two. The others, of TensorBoard and CSVLogger, describe this process' files.
_NOT_STATE = {"params", "model", "is_tracing", "profiler_started", "should_write_train_graph"}
_NOT_STATE |= {"log_write_dir", "train_dir", "val_dir", "writers", "prev_summary_state"}
_NOT_STATE |= {"append_header"}
_METHOD = "state()"


class CallbackStates:
    """State of a list of callbacks: ``state()`` and ``set_state(value)``, or plain attributes."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        """Numbers the callbacks of each class and monitored metric, without those of ``fit``."""
        self._callbacks: dict[tuple[str, str, int], Any] = {}
        for callback in callbacks:
            kind, monitor = type(callback), str(getattr(callback, "monitor", ""))
            if kind.__name__ != "ProgbarLogger" and not kind.__module__.startswith("tfmultigpu."):
                number = sum(key[:2] == (kind.__name__, monitor) for key in self._callbacks)
                self._callbacks[kind.__name__, monitor, number] = callback
        self._warned: set[str] = set()

    def read(self, arrays: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        """Returns the state of each callback in JSON types, and adds its arrays to ``arrays``."""
        states: list[dict[str, Any]] = []
        unsaved: list[str] = []
        for key, callback in self._callbacks.items():
            packed = {}
            for name, value in _values(callback).items():
                try:
                    packed[name] = _pack(value, arrays)
                except (TypeError, RecursionError) as error:
                    if name == _METHOD:
                        raise CheckpointError(
                            "The state of a callback cannot be saved. Received: "
                            f"{key[0]}.state() returned {error}. Return numbers, strings, arrays, "
                            "or lists and dicts of them."
                        ) from None
                    if not is_part_of_keras(type(callback)):
                        unsaved.append(f"{key[0]}.{name} ({type(value).__name__})")
            states.append({"key": key, "values": packed})
        if new := [name for name in unsaved if name not in self._warned]:
            self._warned.update(new)
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
            for name, packed in state["values"].items() if callback is not None else ():
                value = _unpack(packed, arrays)
                if name == _METHOD:
                    callback.set_state(value)
                else:
                    setattr(callback, name, value)

    def missing(self, stored: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the names of stored callbacks that are not here."""
        return [state["key"][0] for state in stored if self._match(state) is None]

    def _match(self, state: Mapping[str, Any]) -> Any:
        """Returns the callback of a state, by class, monitored metric and order; or None."""
        callback = self._callbacks.get(tuple(state["key"]))
        return callback if _has_methods(callback) == (_METHOD in state["values"]) else None


def _has_methods(callback: Any) -> bool:
    return all(callable(getattr(type(callback), name, None)) for name in ("state", "set_state"))


def _values(callback: Any) -> dict[str, Any]:
    """Returns the result of ``state()``, or all attributes that may be state.

    Arguments of a constructor are not: a run resumed with another ``patience`` uses it.
    """
    if _has_methods(callback):
        return {_METHOD: callback.state()}
    constructors = [vars(kind).get("__init__") for kind in type(callback).__mro__[:-1]]
    parameters = [set(inspect.signature(f).parameters) for f in constructors if f is not None]
    skipped = _NOT_STATE.union(*parameters)
    return {
        name: value
        for name, value in vars(callback).items()
        if name.lstrip("_") not in skipped and not _is_no_state(value)
    }


def _is_no_state(value: Any) -> bool:
    """Returns whether a value is a function, a variable, or holds variables, as a model does."""
    values = value if type(value) in (list, tuple) and value else [value]
    return all(callable(v) or hasattr(v, "variables") or hasattr(v, "assign_add") for v in values)


def _pack(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Returns a plain value in JSON types; its arrays go to ``arrays``. Else it is a TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, dict):
        items = [_pack(item, arrays) for item in (value.items() if kind is dict else value)]
        return items if kind is list else {"kind": kind.__name__, "items": items}
    array = np.array(value) if isinstance(value, (np.ndarray, np.generic)) else np.array(None)
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.astype("float32")  # NumPy does not know bfloat16 and similar types.
    if array.dtype.kind not in "biufcSUMm":
        raise TypeError(kind.__name__)
    name = f"fit/callbacks/{len(arrays)}"
    arrays[name] = array
    return {"kind": "array" if isinstance(value, np.ndarray) else "scalar", "array": name}


def _unpack(packed: Any, arrays: Arrays) -> Any:
    """Returns the value of a packed one."""
    if isinstance(packed, list):
        return [_unpack(item, arrays) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "items" in packed:
        return {"tuple": tuple, "dict": dict}[packed["kind"]](_unpack(packed["items"], arrays))
    array = arrays[packed["array"]]
    return array[()] if packed["kind"] == "scalar" else array.copy()
