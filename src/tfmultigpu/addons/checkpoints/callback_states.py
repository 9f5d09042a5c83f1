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
        """Names the callbacks by class, monitored metric and order, without those of ``fit``."""
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            kind = type(callback)
            if kind.__name__ != "ProgbarLogger" and not kind.__module__.startswith("tfmultigpu."):
                name = f"{kind.__name__} {getattr(callback, 'monitor', '')}".strip()
                number = sum(key.rpartition(" #")[0] == name for key in self._callbacks)
                self._callbacks[f"{name} #{number}"] = callback
        self._warned: set[str] = set()

    def read(self, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the state of each callback in JSON types, and adds its arrays to ``arrays``."""
        states: dict[str, dict[str, Any]] = {}
        unsaved: list[str] = []
        for key, callback in self._callbacks.items():
            states[key] = {}
            for name, value in _values(callback).items():
                try:
                    states[key][name] = _pack(value, arrays)
                except (TypeError, RecursionError) as error:
                    if name == _METHOD:
                        raise CheckpointError(
                            f"The state of a callback cannot be saved. Received: {error} from "
                            f"state() of {key}. Return numbers, strings, arrays, or lists and "
                            "dicts of them."
                        ) from None
                    if not is_part_of_keras(type(callback)):
                        unsaved.append(f"{type(callback).__name__}.{name} ({error})")
        if new := [name for name in unsaved if name not in self._warned]:
            self._warned.update(new)
            _log.warning(
                "Checkpoints cannot save these attributes of callbacks: %s. A resumed run starts "
                "with new ones. Write state(), which returns numbers, strings, arrays, or lists "
                "and dicts of them, and set_state(value) in the callback.",
                ", ".join(new),
            )
        return states

    def write(self, stored: Mapping[str, Mapping[str, Any]], arrays: Arrays) -> None:
        """Restores the stored states; callbacks without one keep their values."""
        for key in stored.keys() & self._callbacks.keys():
            for name, packed in stored[key].items():
                value = _unpack(packed, arrays)
                if name == _METHOD:
                    self._callbacks[key].set_state(value)
                else:
                    setattr(self._callbacks[key], name, value)

    def missing(self, stored: Mapping[str, Any]) -> list[str]:
        """Returns the names of stored callbacks that are not here."""
        return sorted(stored.keys() - self._callbacks.keys())


def _values(callback: Any) -> dict[str, Any]:
    """Returns the result of ``state()``, or all attributes that may be state.

    Arguments of a constructor are not: a run resumed with another ``patience`` uses it.
    """
    if all(callable(getattr(type(callback), name, None)) for name in ("state", "set_state")):
        return {_METHOD: callback.state()}
    constructors = [vars(kind).get("__init__") for kind in type(callback).__mro__[:-1]]
    parameters = [set(inspect.signature(f).parameters) for f in constructors if f is not None]
    skipped = _NOT_STATE.union(*parameters)
    return {
        name: value
        for name, value in vars(callback).items()
        if name.lstrip("_") not in skipped and not callable(value)
    }


def _pack(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Returns a plain value in JSON types; its arrays go to ``arrays``. Else it is a TypeError."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, dict):
        items = [_pack(item, arrays) for item in (value.items() if kind is dict else value)]
        return items if kind is list else {"kind": kind.__name__, "items": items}
    array = np.array(value) if isinstance(value, (np.ndarray, np.generic)) else None
    if array is None or array.dtype.kind not in "biufcSUMm":
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
