"""Warns of a step that is traced again at each call, and names what changed between its traces.

A trace takes seconds, and the step that it makes takes milliseconds. Who changes what a trace
takes in at every batch sees the same numbers, a hundred times later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import tensorflow as tf

from tfmultigpu.accumulation.settings import INNER
from tfmultigpu.user_code import warn

# What a trace depends on besides the batch, by name.
Facts = Mapping[str, object]
_MOST = 5  # Calls in a row that each trace the step once more, until that is said.

SETTING = "optimizer."  # What facts of an optimizer begin with.
BATCH = "the batch"
_ITERATORS = "the iterator"
_OF_BATCH = "Give batches of one structure, dtype and rank: cast and pad them in dataset.map."
_OF_LAYERS = (
    "Change what is trained or synchronized less often; or make a step for each set of variables, "
    "tmg.make_train_step(..., variables=...), and call them in turn."
)
_OF_SETTINGS = (
    "Set it before training, or at most once an epoch, in on_epoch_begin: Keras decides by it in "
    "Python what the step computes, so it cannot be a variable."
)
_IN_PYTHON = "clip", "momentum"  # In the names of settings that Keras compares with a number.


class Retraces:
    """The traces of one step."""

    def __init__(self) -> None:
        self._count = self._in_a_row = 0
        self._last: Facts | None = None
        self._changes: dict[str, tuple[object, object]] = {}  # Between the last two traces.
        self._is_told = False

    def note(self, facts: Facts) -> None:
        """Notes a trace, with all that it takes in by name."""
        before = facts if self._last is None else self._last
        self._changes = {}
        for name in {**before, **facts}:
            old, new = before.get(name), facts.get(name)
            if old != new:
                self._changes[name] = old, new
        self._last = facts
        self._count += 1

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches a call of the step; inside a function of the user its traces are part of that."""
        if tf.inside_function():
            yield
            return
        before = self._count
        yield
        self._in_a_row = self._in_a_row + 1 if self._count > before else 0
        if self._in_a_row > _MOST and not self._is_told:
            self._is_told = True
            self._tell()

    def _tell(self) -> None:
        # Of iterators of another type each time a trace takes in nothing new.
        changed = self._changes or {_ITERATORS: ("one type", "another")}
        changes = [_in_words(name, *values) for name, values in changed.items()]
        warn(
            f"The last {self._in_a_row} calls of the step each traced it once more, which takes a "
            f"hundred times as long as a step. Received: {'; '.join(changes[:3])}. "
            f"{_advice(*next(iter(changed.items())))}"
        )


def _advice(name: str, values: tuple[object, object]) -> str:
    """Returns the line to write if something of this name changes."""
    if name == _ITERATORS:
        return "Give step.run the iterators of one dataset, iter(data), or of datasets of one type."
    if name == BATCH:
        return _OF_BATCH
    if SETTING not in name:
        return _OF_LAYERS
    setting = name.partition(SETTING)[2]
    is_inside = any(mark in setting.removeprefix(INNER) for mark in ".[")
    is_asked = any(word in setting for word in _IN_PYTHON)
    if is_inside or is_asked or not isinstance(values[1], float):
        return _OF_SETTINGS
    return (
        f"Make it a variable once, in strategy.scope(): optimizer.{setting} = "
        f"keras.Variable({values[1]:.6g}, trainable=False); then set it by "
        f"optimizer.{setting}.assign(value)."
    )


def _in_words(name: str, old: object, new: object) -> str:
    """Returns what changed, for a person."""
    if isinstance(old, list) and isinstance(new, list):
        gone = [entry for entry in old if entry not in new]
        added = [entry for entry in new if entry not in old]
        return f"{name}, without {gone[:3]}, with {added[:3]}"
    return f"{name} from {_shown(old)} to {_shown(new)}"


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value
