"""State of callbacks: read when a run is saved, restored when it resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfmultigpu.checkpoints.callback_places import Holder, find_holders, has_methods, ids_of
from tfmultigpu.checkpoints.plain_values import NotPlainError, needed_places, pack, unpack
from tfmultigpu.errors import CheckpointError

__all__ = ["CallbackStates"]

_log = logging.getLogger("tfmultigpu")

_Arrays = Mapping[str, np.ndarray[Any, Any]]


class CallbackStates:
    """State of a list of callbacks.

    A callback may define ``state()`` and ``set_state(state)``. Otherwise its state is every plain
    value that training has changed: in its attributes, in callbacks and models it holds, and in
    closures of its functions. Arguments of a Keras constructor are not state, unless a subclass
    changes them: a run resumed with a new ``patience`` uses it.
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
        self._before = self._after = self._snapshots()
        self._logged: set[str] = set()

    def prepare(self, stored: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """Cuts the files of callbacks to their size in the checkpoint, to append to them.

        Call it before ``on_train_begin``, and the function it returns afterwards.
        """
        changed = []
        for entry, one in self._matches(stored):
            if _is_csv_logger(one) and "file_size" in entry:
                _truncate(Path(one.filename), entry["file_size"])
                changed.append((one, one.append))
                one.append = True

        def restore_append() -> None:
            for one, append in changed:
                one.append = append

        return restore_append

    def begin(self) -> None:
        """Records the values after ``on_train_begin``, and logs those that cannot be saved."""
        self._after = self._snapshots()
        self._log_unsaved(
            f"{self._entries[i][0]}.{place} ({kind})"
            for i, snapshot in enumerate(self._after)
            for place, kind in snapshot.unsaved.items()
        )

    def _log_unsaved(self, places: Iterable[str]) -> None:
        """Logs each place that cannot be saved once."""
        unsaved = [place for place in dict.fromkeys(places) if place not in self._logged]
        self._logged.update(unsaved)
        if unsaved:
            _log.warning(
                "Checkpoints cannot save these attributes of callbacks: %s. A resumed run starts "
                "with new ones. From on_train_begin on, store numbers, strings, arrays, or lists "
                "and dicts of them. Or define state(), which returns such values, and "
                "set_state(state).",
                ", ".join(unsaved),
            )

    def _snapshots(self) -> list[_Snapshot]:
        """Returns a snapshot of each callback, without the values."""
        return [_snapshot(one, _name(i)).without_values() for i, one in enumerate(self._holders())]

    def _holders(self) -> list[dict[str, Holder]]:
        """Returns the holders of values in each callback."""
        callbacks = [one for *_, one in self._entries]
        known = {id(one) for one in callbacks}
        if self._model is not None:
            optimizer = getattr(self._model, "optimizer", None)
            known |= {id(self._model), id(optimizer)} | ids_of(self._model.variables)
            known |= ids_of(getattr(optimizer, "variables", ()))
        return [find_holders(one, known) for one in callbacks]

    def read(self, arrays: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        """Returns the state of each callback in JSON types, and adds its arrays to ``arrays``.

        Raises:
            CheckpointError: ``state()`` of a callback returned a value that cannot be saved.
        """
        found = []
        for i, holders in enumerate(self._holders()):
            name, monitor, number, _ = self._entries[i]
            state = self._read_one(i, holders, arrays)
            found.append({"name": name, "monitor": monitor, "number": number, **state})
        return found

    def _read_one(
        self, i: int, holders: Mapping[str, Holder], arrays: dict[str, np.ndarray[Any, Any]]
    ) -> dict[str, Any]:
        name = _name(i)
        if has_methods(holders[""].one):
            return {"state": _state_of(holders[""].one, name, arrays)}
        before, after, now = self._before[i], self._after[i], _snapshot(holders, name)
        lost = dict(now.unsaved)
        attributes: dict[str, Any] = {}
        for place, value in now.values.items():
            if value.digest == before.digest(place) == after.digest(place):
                continue
            path = place.rpartition(".")[0]
            if after.kinds.get(path) != holders[path].kind:
                lost[path] = holders[path].kind  # A resumed run has no holder for it.
            elif not value.needs <= after.needs(place):
                lost[place] = "a defaultdict or generator that cannot be rebuilt"
            else:
                attributes[place] = value.packed
                arrays.update(value.arrays)
        states = {}
        for path, holder in holders.items():
            if has_methods(holder.one):
                if after.kinds.get(path) == holder.kind:
                    states[path] = _state_of(holder.one, f"{name}/{path}", arrays)
                else:
                    lost[path] = holder.kind
        callback = self._entries[i][0]
        self._log_unsaved(f"{callback}.{place} ({kind})" for place, kind in lost.items())
        found: dict[str, Any] = {"attributes": attributes}
        if states:
            found["states"] = states
        one = holders[""].one
        if _is_csv_logger(one) and Path(one.filename).is_file():
            found["file_size"] = Path(one.filename).stat().st_size
        return found

    def write(self, stored: Sequence[Mapping[str, Any]], arrays: _Arrays) -> None:
        """Restores the stored states; callbacks without one keep their values.

        Raises:
            CheckpointError: A callback rejects its state.
        """
        holders_of = {id(one[""].one): one for one in self._holders()}
        for entry, one in self._matches(stored):
            holders = holders_of[id(one)]
            try:
                if "state" in entry:
                    one.set_state(unpack(entry["state"], arrays))
                for path, packed in entry.get("states", {}).items():
                    holders[path].one.set_state(unpack(packed, arrays))
                for place, packed in entry.get("attributes", {}).items():
                    path, _, name = place.rpartition(".")
                    holder = holders[path]
                    present = holder.values.get(name)
                    holder.assign(name, unpack(packed, arrays, present))
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
            and (
                not with_state
                or "state" in entry
                or any(entry.get(one) for one in ("attributes", "states"))
            )
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


class _Value(NamedTuple):
    """A value at one moment.

    Attributes:
        packed: The value in JSON types.
        arrays: Its arrays.
        digest: A digest of both.
        needs: The places in it that ``unpack`` can fill only if they hold an object already.
    """

    packed: Any
    arrays: _Arrays
    digest: str
    needs: set[str]


class _Snapshot(NamedTuple):
    """The values of a callback at one moment.

    Attributes:
        kinds: The class of each holder, by path.
        values: The values, by place.
        unsaved: The kind of each value that cannot be saved, by place.
    """

    kinds: dict[str, str]
    values: dict[str, _Value]
    unsaved: dict[str, str]

    def without_values(self) -> _Snapshot:
        """Returns a copy with digests only, to compare later snapshots with."""
        digests = {
            place: one._replace(packed=None, arrays={}) for place, one in self.values.items()
        }
        return self._replace(values=digests)

    def digest(self, place: str) -> str | None:
        """Returns the digest of a value; None if there is no value."""
        return self.values[place].digest if place in self.values else None

    def needs(self, place: str) -> set[str]:
        """Returns the places in a value that hold an object which cannot be rebuilt."""
        return self.values[place].needs if place in self.values else set()


def _snapshot(holders: Mapping[str, Holder], name: str) -> _Snapshot:
    values: dict[str, _Value] = {}
    unsaved: dict[str, str] = {}
    for path, holder in holders.items():
        prefix = f"{path}." if path else ""
        unsaved.update({f"{prefix}{opaque}": kind for opaque, kind in holder.opaque.items()})
        for attribute, value in holder.values.items():
            place = f"{prefix}{attribute}"
            arrays: dict[str, np.ndarray[Any, Any]] = {}
            try:
                packed = pack(value, f"{name}/{place}", arrays)
            except NotPlainError as error:
                if holder.reports_unsaved:
                    unsaved[place] = str(error)
            else:
                digest = _digest(packed, arrays)
                values[place] = _Value(packed, arrays, digest, needed_places(packed))
    return _Snapshot({path: holder.kind for path, holder in holders.items()}, values, unsaved)


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
    found = hashlib.sha256(json.dumps(packed, default=str).encode())
    for array in arrays.values():
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _is_csv_logger(one: Any) -> bool:
    import keras

    return isinstance(one, keras.callbacks.CSVLogger)


def _truncate(path: Path, size: int) -> None:
    """Removes the part of a file that was written after the checkpoint."""
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
