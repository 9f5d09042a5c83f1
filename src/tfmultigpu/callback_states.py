"""The state of callbacks as part of a run: read when it is saved, put back when it resumes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import CheckpointError
from tfmultigpu.plain_values import NotPlainError, pack, unpack

__all__ = ["CallbackStates"]

_log = logging.getLogger("tfmultigpu")

_PLUMBING = {"params", "_model", "model"}
# Of TensorBoard: what lives in this process alone, the profiler and the files of this run.
_OF_THIS_PROCESS = {"_is_tracing", "_profiler_started", "_should_write_train_graph"}
_Arrays = Mapping[str, np.ndarray[Any, Any]]


class CallbackStates:
    """The state of a list of callbacks.

    It is what ``state()`` of a callback returns, and ``set_state`` gets back. Of one without these
    it is each attribute of a plain kind that training has changed. What a constructor of Keras was
    given is never state: who resumes with another ``patience`` gets it.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        """Notes what attributes are before training; call it before ``on_train_begin``."""
        import keras

        seen: dict[tuple[str, str], int] = {}
        self._entries: list[tuple[str, str, int, Any]] = []
        for one in callbacks:
            if isinstance(one, keras.callbacks.ProgbarLogger) or hasattr(one, "on_fit_exit"):
                continue  # These show, or save.
            monitor = getattr(one, "monitor", None)
            key = type(one).__name__, monitor if isinstance(monitor, str) else ""
            self._entries.append((*key, seen.get(key, 0), one))
            seen[key] = seen.get(key, 0) + 1
        self._before = [_digests(one) for *_, one in self._entries]
        self._after = self._before

    def prepare(self, stored: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """Has files of callbacks go on where the checkpoint was saved.

        Call it before ``on_train_begin``, and what it returns after it.
        """
        import keras

        changed = []
        for facts, one in self._matches(stored):
            if isinstance(one, keras.callbacks.CSVLogger) and "file_size" in facts:
                _cut(Path(one.filename), facts["file_size"])
                changed.append((one, one.append))
                one.append = True

        def put_back() -> None:
            for one, append in changed:
                one.append = append

        return put_back

    def begin(self) -> None:
        """Notes what ``on_train_begin`` left, and logs what of it cannot be saved."""
        self._after = [_digests(one) for *_, one in self._entries]
        unsaved = [
            f"{name}.{attribute} ({kind})"
            for name, _, _, one in self._entries
            for attribute, kind in _unsaved(one)
        ]
        if unsaved:
            _log.warning(
                "Checkpoints do not hold what these attributes of callbacks remember: %s. A run "
                "that is resumed begins with new ones. Keep numbers, strings, arrays, and lists or "
                "dicts of them, or give the callback state(), which returns such values, and "
                "set_state(state).",
                ", ".join(unsaved),
            )

    def read(self, arrays: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        """Returns the state of each callback as JSON can hold it; adds its arrays to ``arrays``.

        Raises:
            CheckpointError: ``state()`` of a callback returned something that cannot be saved.
        """
        return [
            {"name": name, "monitor": monitor, "number": number, **self._read_one(i, one, arrays)}
            for i, (name, monitor, number, one) in enumerate(self._entries)
        ]

    def _read_one(
        self, i: int, one: Any, arrays: dict[str, np.ndarray[Any, Any]]
    ) -> dict[str, Any]:
        import keras

        name = f"fit/callbacks/{i}"
        if _has_methods(one):
            try:
                return {"state": pack(one.state(), name, arrays)}
            except NotPlainError as error:
                raise CheckpointError(
                    f"The state of a callback cannot be saved. Received: {type(one).__name__}."
                    f"state() with {error}. Return numbers, strings, arrays, and lists or dicts "
                    "of them."
                ) from None
        found: dict[str, Any] = {}
        for attribute, value in _attributes(one).items():
            own: dict[str, np.ndarray[Any, Any]] = {}
            with contextlib.suppress(NotPlainError):
                packed = pack(value, f"{name}/{attribute}", own)
                digest = _digest(packed, own)
                if not digest == self._before[i].get(attribute) == self._after[i].get(attribute):
                    found[attribute] = packed
                    arrays.update(own)
        facts: dict[str, Any] = {"attributes": found}
        if isinstance(one, keras.callbacks.CSVLogger) and Path(one.filename).is_file():
            facts["file_size"] = Path(one.filename).stat().st_size
        return facts

    def write(self, stored: Sequence[Mapping[str, Any]], arrays: _Arrays) -> None:
        """Puts states back; callbacks that were not there begin anew, which is logged.

        Raises:
            CheckpointError: A callback does not take its state.
        """
        for facts, one in self._matches(stored):
            try:
                if "state" in facts:
                    one.set_state(unpack(facts["state"], arrays))
                for attribute, packed in facts.get("attributes", {}).items():
                    present = getattr(one, attribute, None)
                    setattr(one, attribute, unpack(packed, arrays, present))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"The state of a callback could not be put back. Received: {facts['name']}, "
                    f"and {type(error).__name__}: {error}. Give the callback that was given when "
                    "the checkpoint was saved, or leave it out to go on without its state."
                ) from error

    def tell_differences(self, stored: Sequence[Mapping[str, Any]]) -> None:
        """Logs which callbacks have no state in the checkpoint, and which are not there."""
        matched = self._matches(stored)
        known = [id(one) for _, one in matched]
        new = [name for name, _, _, one in self._entries if id(one) not in known]
        gone = self.missing(stored)
        if new:
            _log.info("Callbacks that the checkpoint does not know begin anew: %s", ", ".join(new))
        if gone:
            _log.warning(
                "The checkpoint holds the state of callbacks that were not given, so that the run "
                "may end otherwise than without the restart: %s",
                ", ".join(gone),
            )

    def missing(self, stored: Sequence[Mapping[str, Any]], *, with_state: bool = True) -> list[str]:
        """Returns the names of callbacks in the checkpoint, of those with a state, not here."""
        matched = [id(facts) for facts, _ in self._matches(stored)]
        return [
            facts["name"]
            for facts in stored
            if id(facts) not in matched
            and (not with_state or facts.get("attributes") or "state" in facts)
        ]

    def _matches(self, stored: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Any]]:
        """States with their callbacks: those of one class that watch one metric, in their order."""
        there = {(one["name"], one["monitor"], one["number"]): one for one in stored}
        return [
            (there[name, monitor, number], one)
            for name, monitor, number, one in self._entries
            if (name, monitor, number) in there
            and _has_methods(one) == ("state" in there[name, monitor, number])
        ]


def _has_methods(one: Any) -> bool:
    methods = (getattr(type(one), name, None) for name in ("state", "set_state"))
    return all(callable(method) for method in methods)


def _attributes(one: Any) -> dict[str, Any]:
    """The attributes of a callback that may be its state."""
    given = {
        name
        for kind in type(one).__mro__
        if _is_keras(kind) and "__init__" in vars(kind)
        for name in inspect.signature(vars(kind)["__init__"]).parameters
    }
    skipped = _PLUMBING | given
    if any(_is_keras(kind) and kind.__name__ == "TensorBoard" for kind in type(one).__mro__):
        skipped |= _OF_THIS_PROCESS
    return {
        name: value
        for name, value in vars(one).items()
        if name not in skipped and not _is_tool(value)
    }


def _is_tool(value: Any) -> bool:
    """Returns whether a value is used by training, and does not change with it."""
    import keras

    things = (
        type,
        types.ModuleType,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        functools.partial,
        np.ufunc,
        io.IOBase,
        logging.Logger,
        keras.Model,
        keras.Layer,
        keras.Loss,
        keras.callbacks.Callback,
        keras.optimizers.Optimizer,
        tf.data.Dataset,
        tf.distribute.Strategy,
        tf.distribute.DistributedDataset,
        tf.summary.SummaryWriter,
    )
    return isinstance(value, things) or hasattr(value, "get_concrete_function")


def _unsaved(one: Any) -> list[tuple[str, str]]:
    """Attributes of a callback of the user's that cannot be saved, each with its kind."""
    if _is_keras(type(one)) or _has_methods(one):
        return []
    found = []
    for name, value in _attributes(one).items():
        try:
            pack(value, "", {})
        except NotPlainError as error:
            found.append((name, str(error)))
    return found


def _digests(one: Any) -> dict[str, str]:
    if _has_methods(one):
        return {}
    found = {}
    for name, value in _attributes(one).items():
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        with contextlib.suppress(NotPlainError):
            found[name] = _digest(pack(value, "", arrays), arrays)
    return found


def _digest(packed: Any, arrays: _Arrays) -> str:
    found = hashlib.sha256(json.dumps(packed, default=str).encode())
    for array in arrays.values():
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _is_keras(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "keras"


def _cut(path: Path, size: int) -> None:
    """Takes away what was written to a file after a checkpoint was saved."""
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
