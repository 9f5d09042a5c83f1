"""State of callbacks: read when a run is saved, restored when it resumes."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import logging
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.checkpoints.plain_values import NotPlainError, pack, unpack
from tfmultigpu.errors import CheckpointError

__all__ = ["CallbackStates"]

_log = logging.getLogger("tfmultigpu")

_Arrays = Mapping[str, np.ndarray[Any, Any]]

_SET_BY_KERAS = {"params", "_model", "model"}
# Attributes of TensorBoard that describe this process: its profiler and its files.
_OF_THIS_PROCESS = {"_is_tracing", "_profiler_started", "_should_write_train_graph"}


class CallbackStates:
    """State of a list of callbacks.

    A callback may define ``state()`` and ``set_state(value)``. Otherwise its state is each plain
    attribute that training has changed. Arguments of a Keras constructor are not state: a run
    resumed with a new ``patience`` uses it.
    """

    def __init__(self, callbacks: Sequence[Any], model: Any = None) -> None:
        """Records the values of callbacks before training; call it before ``on_train_begin``.

        Args:
            callbacks: The callbacks.
            model: The trained model; its variables are saved elsewhere.
        """
        import keras

        seen: dict[tuple[str, str], int] = {}
        self._model = model
        self._entries: list[tuple[str, str, int, Any]] = []
        for one in callbacks:
            if isinstance(one, keras.callbacks.ProgbarLogger) or hasattr(one, "on_fit_exit"):
                continue  # The progress bar and checkpoint callbacks have no state to save.
            monitor = getattr(one, "monitor", None)
            key = type(one).__name__, monitor if isinstance(monitor, str) else ""
            self._entries.append((*key, seen.get(key, 0), one))
            seen[key] = seen.get(key, 0) + 1
        self._before = self._after = self._digests()
        self._named: set[str] = set()

    def prepare(self, stored: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """Cuts the files of callbacks to their size in the checkpoint, to append to them.

        Call it before ``on_train_begin``, and the function it returns afterwards.
        """
        changed = []
        for entry, one in self._matches(stored):
            if _is_csv_logger(one) and "file_size" in entry:
                _truncate(pathlib.Path(one.filename), entry["file_size"])
                changed.append((one, one.append))
                one.append = True

        def restore_append() -> None:
            for one, append in changed:
                one.append = append

        return restore_append

    def begin(self) -> None:
        """Records the values after ``on_train_begin``."""
        self._after = self._digests()

    def _digests(self) -> list[dict[str, str]]:
        """Returns digests of the plain attributes of each callback, by name."""
        found = []
        for i, (*_, callback) in enumerate(self._entries):
            attributes = _attributes(callback).items()
            packed = {name: _packed(value, f"{_name(i)}/{name}") for name, value in attributes}
            found.append({name: _digest(*one) for name, one in packed.items() if one is not None})
        return found

    def read(self, arrays: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        """Returns the state of each callback in JSON types, and adds its arrays to ``arrays``.

        Raises:
            CheckpointError: ``state()`` of a callback returned a value that cannot be saved.
        """
        found, unsaved = [], []
        for i, (name, monitor, number, callback) in enumerate(self._entries):
            if has_methods(callback):
                state = {"state": _state_of(callback, _name(i), arrays)}
            else:
                state, lost = self._read_attributes(i, callback, arrays)
                unsaved += [f"{name}.{place}" for place in lost]
            found.append({"name": name, "monitor": monitor, "number": number, **state})
        self._warn_unsaved(unsaved)
        return found

    def _read_attributes(
        self, i: int, callback: Any, arrays: dict[str, np.ndarray[Any, Any]]
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns the state of a callback, and its attributes that cannot be saved."""
        attributes: dict[str, Any] = {}
        unsaved = []
        for name, value in _attributes(callback).items():
            packed = _packed(value, f"{_name(i)}/{name}")
            if packed is None:
                if not is_part_of_keras(type(callback)) and not self._is_saved_elsewhere(value):
                    unsaved.append(f"{name} ({type(value).__name__})")
                continue
            changed = {_digest(*packed)} != {self._before[i].get(name), self._after[i].get(name)}
            if changed:
                attributes[name] = packed[0]
                arrays.update(packed[1])
        found: dict[str, Any] = {"attributes": attributes}
        if _is_csv_logger(callback) and pathlib.Path(callback.filename).is_file():
            found["file_size"] = pathlib.Path(callback.filename).stat().st_size
        return found, unsaved

    def _is_saved_elsewhere(self, value: Any) -> bool:
        """Returns whether a value belongs to the trained model, is a callback, or never changes."""
        import keras

        if type(value) in (list, tuple):
            return all(self._is_saved_elsewhere(item) for item in value)
        optimizer = getattr(self._model, "optimizer", None)
        variables = [*getattr(self._model, "variables", ()), *getattr(optimizer, "variables", ())]
        known = {id(one) for variable in variables for one in (variable, variable.value)}
        kinds = (keras.Layer, keras.optimizers.Optimizer, keras.Metric, tf.Module)
        callbacks = [callback for *_, callback in self._entries]
        if value is self._model or any(value is callback for callback in callbacks):
            return True
        if isinstance(value, kinds):
            return all(id(variable) in known for variable in value.variables)
        return id(value) in known or _is_tool(value)

    def _warn_unsaved(self, places: Sequence[str]) -> None:
        """Names each place that cannot be saved once."""
        new = [place for place in dict.fromkeys(places) if place not in self._named]
        self._named.update(new)
        if new:
            _log.warning(
                "Checkpoints cannot save these attributes of callbacks: %s. A resumed run starts "
                "with new ones. Write state(), which returns numbers, strings, arrays, or lists "
                "and dicts of them, and set_state(value) in the callback.",
                ", ".join(new),
            )

    def write(self, stored: Sequence[Mapping[str, Any]], arrays: _Arrays) -> None:
        """Restores the stored states; callbacks without one keep their values.

        Raises:
            CheckpointError: A callback rejects its state.
        """
        for entry, one in self._matches(stored):
            try:
                if "state" in entry:
                    one.set_state(unpack(entry["state"], arrays))
                for name, packed in entry.get("attributes", {}).items():
                    setattr(one, name, unpack(packed, arrays))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"A callback rejected its saved state. Received: callback {entry['name']}, "
                    f"{type(error).__name__}: {error}. Pass the callback that the checkpoint was "
                    "saved with, or leave it out to resume without its state."
                ) from error

    def log_differences(self, stored: Sequence[Mapping[str, Any]]) -> None:
        """Logs callbacks without a stored state, and stored states without a callback."""
        matched = self._matches(stored)
        known = [id(one) for _, one in matched]
        new = [name for name, _, _, one in self._entries if id(one) not in known]
        gone = self.missing(stored)
        if new:
            _log.info("The checkpoint has no state of these callbacks: %s", ", ".join(new))
        if gone:
            _log.warning(
                "The checkpoint has the state of callbacks that were not passed. The run may end "
                "differently than without the restart: %s",
                ", ".join(gone),
            )

    def missing(self, stored: Sequence[Mapping[str, Any]], *, with_state: bool = True) -> list[str]:
        """Returns the names of stored callbacks that are missing here.

        Args:
            stored: The stored states.
            with_state: Whether to count only callbacks with a state.
        """
        matched = [id(entry) for entry, _ in self._matches(stored)]
        return [
            entry["name"]
            for entry in stored
            if id(entry) not in matched
            and (not with_state or "state" in entry or entry.get("attributes"))
        ]

    def _matches(self, stored: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Any]]:
        """Returns pairs of state and callback, matched by class, monitored metric and order."""
        by_key = {(one["name"], one["monitor"], one["number"]): one for one in stored}
        return [
            (by_key[name, monitor, number], one)
            for name, monitor, number, one in self._entries
            if (name, monitor, number) in by_key
            and has_methods(one) == ("state" in by_key[name, monitor, number])
        ]


def has_methods(callback: Any) -> bool:
    """Returns whether a callback has ``state()`` and ``set_state(value)``."""
    methods = (getattr(type(callback), name, None) for name in ("state", "set_state"))
    return all(callable(method) for method in methods)


def _attributes(callback: Any) -> dict[str, Any]:
    """Returns the attributes that are not arguments of a Keras constructor."""
    import keras

    if has_methods(callback):
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


def _packed(value: Any, name: str) -> tuple[Any, _Arrays] | None:
    """Returns a value in JSON types and its arrays; None if it is not plain."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    try:
        return pack(value, name, arrays), arrays
    except NotPlainError:
        return None


def _is_tool(value: Any) -> bool:
    """Returns whether training uses a value but does not change it."""
    import keras

    tools = (
        type,
        pathlib.PurePath,
        types.ModuleType,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        functools.partial,
        np.ufunc,
        io.IOBase,
        logging.Logger,
        keras.Loss,
        keras.optimizers.schedules.LearningRateSchedule,
        tf.data.Dataset,
        tf.distribute.Strategy,
        tf.distribute.DistributedDataset,
        tf.summary.SummaryWriter,
    )
    return isinstance(value, tools) or hasattr(value, "get_concrete_function")


def _name(i: int) -> str:
    """Returns the prefix of the names of a callback's arrays."""
    return f"fit/callbacks/{i}"


def _state_of(one: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    try:
        return pack(one.state(), name, arrays)
    except NotPlainError as error:
        raise CheckpointError(
            "The state of a callback cannot be saved. Received: "
            f"{type(one).__name__}.state() returned {error}. Return numbers, strings, arrays, or "
            "lists and dicts of them."
        ) from None


def _digest(packed: Any, arrays: _Arrays) -> str:
    found = hashlib.sha256(json.dumps(packed).encode())
    for array in arrays.values():
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _is_csv_logger(one: Any) -> bool:
    import keras

    return isinstance(one, keras.callbacks.CSVLogger)


def _truncate(path: pathlib.Path, size: int) -> None:
    """Removes the part of a file that was written after the checkpoint."""
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
