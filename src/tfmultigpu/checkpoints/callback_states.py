"""The state of callbacks as part of a run: read when it is saved, put back when it resumes."""

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
    """The state of a list of callbacks.

    It is what ``state()`` of a callback returns, and ``set_state`` gets back. Of one without these
    it is each value of a plain kind that training has changed: attributes, those of callbacks it
    holds, variables of models it holds, and what functions it was given have in their closures.
    What a constructor of Keras was given is never state, unless a subclass changes it: who resumes
    with another ``patience`` gets it.
    """

    def __init__(self, callbacks: Sequence[Any], model: Any = None) -> None:
        """Notes what callbacks remember before training; call it before ``on_train_begin``.

        Args:
            callbacks: The callbacks.
            model: The model that is trained, whose variables are saved elsewhere.
        """
        import keras

        seen: dict[tuple[str, str], int] = {}
        self._model = model
        self._entries: list[tuple[str, str, int, Any]] = []
        for one in callbacks:
            if isinstance(one, keras.callbacks.ProgbarLogger) or hasattr(one, "on_fit_exit"):
                continue  # These show, or save.
            monitor = getattr(one, "monitor", None)
            key = type(one).__name__, monitor if isinstance(monitor, str) else ""
            self._entries.append((*key, seen.get(key, 0), one))
            seen[key] = seen.get(key, 0) + 1
        self._before = self._after = self._look()
        self._told: set[str] = set()

    def prepare(self, stored: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        """Has files of callbacks go on where the checkpoint was saved.

        Call it before ``on_train_begin``, and what it returns after it.
        """
        changed = []
        for facts, one in self._matches(stored):
            if _is_csv_logger(one) and "file_size" in facts:
                _cut(Path(one.filename), facts["file_size"])
                changed.append((one, one.append))
                one.append = True

        def put_back() -> None:
            for one, append in changed:
                one.append = append

        return put_back

    def begin(self) -> None:
        """Notes what ``on_train_begin`` left, and logs what of it cannot be saved."""
        self._after = self._look()
        self._tell_unsaved(
            f"{self._entries[i][0]}.{place} ({kind})"
            for i, sight in enumerate(self._after)
            for place, kind in sight.unsaved.items()
        )

    def _tell_unsaved(self, places: Iterable[str]) -> None:
        """Logs what cannot be saved, each once."""
        unsaved = [place for place in dict.fromkeys(places) if place not in self._told]
        self._told.update(unsaved)
        if unsaved:
            _log.warning(
                "Checkpoints do not hold what these attributes of callbacks remember: %s. A run "
                "that is resumed begins with new ones. Keep numbers, strings, arrays, and lists or "
                "dicts of them, from on_train_begin on, or give the callback state(), which "
                "returns such values, and set_state(state).",
                ", ".join(unsaved),
            )

    def _look(self) -> list[_Sight]:
        """Returns what each callback holds now, without the values."""
        return [_look(one, _name(i)).without_values() for i, one in enumerate(self._holders())]

    def _holders(self) -> list[dict[str, Holder]]:
        """All that has values, in each callback."""
        callbacks = [one for *_, one in self._entries]
        known = {id(one) for one in callbacks}
        if self._model is not None:
            optimizer = getattr(self._model, "optimizer", None)
            known |= {id(self._model), id(optimizer)} | ids_of(self._model.variables)
            known |= ids_of(getattr(optimizer, "variables", ()))
        return [find_holders(one, known) for one in callbacks]

    def read(self, arrays: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
        """Returns the state of each callback as JSON can hold it; adds its arrays to ``arrays``.

        Raises:
            CheckpointError: ``state()`` of a callback returned something that cannot be saved.
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
        before, after, now = self._before[i], self._after[i], _look(holders, name)
        lost = dict(now.unsaved)
        attributes: dict[str, Any] = {}
        for place, value in now.values.items():
            if value.digest == before.digest(place) == after.digest(place):
                continue
            path = place.rpartition(".")[0]
            if after.kinds.get(path) != holders[path].kind:
                lost[path] = holders[path].kind  # Nothing will be there to take it.
            elif not value.needs <= after.needs(place):
                lost[place] = "a defaultdict or generator that nothing can make anew"
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
        of = self._entries[i][0]
        self._tell_unsaved(f"{of}.{place} ({kind})" for place, kind in lost.items())
        facts: dict[str, Any] = {"attributes": attributes}
        if states:
            facts["states"] = states
        one = holders[""].one
        if _is_csv_logger(one) and Path(one.filename).is_file():
            facts["file_size"] = Path(one.filename).stat().st_size
        return facts

    def write(self, stored: Sequence[Mapping[str, Any]], arrays: _Arrays) -> None:
        """Puts states back; callbacks that were not there begin anew, which is logged.

        Raises:
            CheckpointError: A callback does not take its state.
        """
        holders_of = {id(one[""].one): one for one in self._holders()}
        for facts, one in self._matches(stored):
            holders = holders_of[id(one)]
            try:
                if "state" in facts:
                    one.set_state(unpack(facts["state"], arrays))
                for path, packed in facts.get("states", {}).items():
                    holders[path].one.set_state(unpack(packed, arrays))
                for place, packed in facts.get("attributes", {}).items():
                    path, _, name = place.rpartition(".")
                    holder = holders[path]
                    present = holder.values.get(name)
                    holder.put(name, unpack(packed, arrays, present))
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
            and (
                not with_state
                or "state" in facts
                or any(facts.get(one) for one in ("attributes", "states"))
            )
        ]

    def _matches(self, stored: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Any]]:
        """States with their callbacks: those of one class that watch one metric, in their order."""
        there = {(one["name"], one["monitor"], one["number"]): one for one in stored}
        return [
            (there[name, monitor, number], one)
            for name, monitor, number, one in self._entries
            if (name, monitor, number) in there
            and has_methods(one) == ("state" in there[name, monitor, number])
        ]


class _Value(NamedTuple):
    """A value at one moment.

    Attributes:
        packed: What JSON can hold of it.
        arrays: Its arrays.
        digest: A digest of both.
        needs: Where in it something must be present to take it.
    """

    packed: Any
    arrays: _Arrays
    digest: str
    needs: set[str]


class _Sight(NamedTuple):
    """The values that a callback holds at one moment.

    Attributes:
        kinds: The class of each holder.
        values: Its values.
        unsaved: The kinds of those that cannot be saved.
    """

    kinds: dict[str, str]
    values: dict[str, _Value]
    unsaved: dict[str, str]

    def without_values(self) -> _Sight:
        """Returns what later ones are compared with."""
        brief = {place: one._replace(packed=None, arrays={}) for place, one in self.values.items()}
        return self._replace(values=brief)

    def digest(self, place: str) -> str | None:
        """Returns the digest of a value; None where there is none."""
        return self.values[place].digest if place in self.values else None

    def needs(self, place: str) -> set[str]:
        """Returns where in a value something is present that cannot be made anew."""
        return self.values[place].needs if place in self.values else set()


def _look(holders: Mapping[str, Holder], name: str) -> _Sight:
    values: dict[str, _Value] = {}
    unsaved: dict[str, str] = {}
    for path, holder in holders.items():
        way = f"{path}." if path else ""
        unsaved.update({f"{way}{other}": kind for other, kind in holder.others.items()})
        for attribute, value in holder.values.items():
            place = f"{way}{attribute}"
            arrays: dict[str, np.ndarray[Any, Any]] = {}
            try:
                packed = pack(value, f"{name}/{place}", arrays)
            except NotPlainError as error:
                if holder.is_told:
                    unsaved[place] = str(error)
            else:
                digest = _digest(packed, arrays)
                values[place] = _Value(packed, arrays, digest, needed_places(packed))
    return _Sight({path: holder.kind for path, holder in holders.items()}, values, unsaved)


def _name(i: int) -> str:
    """The beginning of the names of a callback's arrays."""
    return f"fit/callbacks/{i}"


def _state_of(one: Any, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    try:
        return pack(one.state(), name, arrays)
    except NotPlainError as error:
        raise CheckpointError(
            f"The state of a callback cannot be saved. Received: {type(one).__name__}."
            f"state() with {error}. Return numbers, strings, arrays, and lists or dicts "
            "of them."
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


def _cut(path: Path, size: int) -> None:
    """Takes away what was written to a file after a checkpoint was saved."""
    if path.is_file() and path.stat().st_size > size:
        os.truncate(path, size)
