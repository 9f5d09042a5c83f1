"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

import dataclasses
import operator
import sys
import types
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.lists import by_id
from tfmultigpu.types import KerasOptimizer

_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, tuple, np.generic)


class Settings:
    """Remembers the settings of an optimizer, at any depth.

    These are its attributes, of optimizers, schedules and objects of the user inside it, the items
    of lists and dicts, and what a function reads from around it.
    """

    def __init__(self) -> None:
        """Remembers nothing, so that any optimizer is a change."""
        self._optimizer: KerasOptimizer = None
        self._noted: list[_Noted] = []
        self._ignored: set[str] = set()

    def note(self, optimizer: KerasOptimizer, *, traced: bool = False) -> None:
        """Remembers an optimizer as it is now; a cache that a trace changes is not a setting."""
        if traced:
            self._ignored |= self._differing()
        self._optimizer = optimizer
        self._noted = _settings_of(optimizer)

    def changed(self, optimizer: KerasOptimizer) -> bool:
        """Returns whether this is another optimizer, or it has other settings; asked each step."""
        return optimizer is not self._optimizer or bool(self._differing())

    def values(self) -> dict[str, object]:
        """Returns the settings by name; of what is neither number nor text, which object it is."""
        values: dict[str, object] = {}
        for noted in self._noted:
            for key, value in _items(noted.holder).items():
                name = noted.name_of(key)
                if name in self._ignored or _compat.is_for_checkpoints(str(key)):
                    continue
                if value is not None and not isinstance(value, _PLAIN):
                    value = f"{type(value).__name__} {id(value)}"
                values[name] = value
        return values

    def _differing(self) -> set[str]:
        different: set[str] = set()
        for noted in self._noted:
            now = _items(noted.holder)
            # Nearly always nothing was set, which is quick to see.
            if not noted.has_objects_of(now):
                different |= noted.differing(now)
        return different - self._ignored


@dataclasses.dataclass(frozen=True)
class _Noted:
    """What holds settings.

    Attributes:
        path: The name of the holder within the optimizer.
        holder: The object, list, dict or function.
        items: The settings as they were.
    """

    path: str
    holder: object
    items: Mapping[object, object]

    def name_of(self, key: object) -> str:
        """Returns the name of a setting within the optimizer, for a person."""
        if isinstance(self.holder, (list, tuple, dict)):
            return f"{self.path}[{key!r}]"
        if not key:
            return self.path
        name = str(key).removeprefix("_")
        return f"{self.path}.{name}" if self.path else name

    def has_objects_of(self, now: Mapping[object, object]) -> bool:
        """Returns whether there are the same objects now."""
        then = self.items
        return len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))

    def differing(self, now: Mapping[object, object]) -> set[str]:
        """Returns the names of the settings that differ now."""
        names: set[str] = set()
        for key in now.keys() | self.items.keys():
            a, b = now.get(key, self), self.items.get(key, self)
            is_plain = type(a) is type(b) and isinstance(a, _PLAIN)
            if not (a is b or (is_plain and a == b) or _compat.is_for_checkpoints(str(key))):
                names.add(self.name_of(key))
        return names


def _settings_of(optimizer: KerasOptimizer) -> list[_Noted]:
    """Returns all that holds settings of an optimizer, each once."""
    inner = unwrap_optimizer(optimizer)
    waiting: list[tuple[str, object]] = []
    for root in by_id([optimizer, inner, *parts_of(inner)]).values():
        waiting.append(("", root))
    noted: dict[int, _Noted] = {}
    while waiting:
        path, holder = waiting.pop()
        if id(holder) in noted:
            continue
        kept = noted[id(holder)] = _Noted(path, holder, dict(_items(holder)))
        for key, value in kept.items.items():
            if _holds_settings(value) and not _compat.is_for_checkpoints(str(key)):
                waiting.append((kept.name_of(key), value))
    return list(noted.values())


def _holds_settings(value: object) -> bool:
    """Returns whether a setting has settings inside it; variables and layers have none."""
    import keras

    if isinstance(value, (list, tuple, dict)):
        items = list(_items(value).values())
        return not any(isinstance(item, (keras.Variable, tf.Variable)) for item in items)
    kinds = keras.optimizers.Optimizer, keras.optimizers.schedules.LearningRateSchedule
    if isinstance(value, (*kinds, types.FunctionType, np.ndarray, set)):
        return True
    others = keras.Variable, keras.Operation, keras.callbacks.Callback, tf.Module, tf.Tensor, type
    if isinstance(value, others) or not hasattr(value, "__dict__"):
        return False
    package = type(value).__module__.partition(".")[0]
    return package not in {"keras", "tensorflow", "tfmultigpu"} | sys.stdlib_module_names


def _items(holder: object) -> Mapping[object, object]:
    """Returns what an object, a list, a dict or a function holds, by its name or place there."""
    if isinstance(holder, dict):
        return holder
    if isinstance(holder, (list, tuple)):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return {"": frozenset(holder)}
    if isinstance(holder, np.ndarray):
        return {"": holder.tobytes()}
    if isinstance(holder, types.FunctionType):
        return _read_by(holder)
    return vars(holder)  # type: ignore[return-value]


def _read_by(function: types.FunctionType) -> dict[object, object]:
    """Returns what a function reads from around it: of globals, neither functions nor classes."""
    read: dict[object, object] = {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*_PLAIN, list, dict, np.ndarray)):
            read[name] = value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            read[name] = cell.cell_contents
        except ValueError:  # What is defined later.
            continue
    return read
