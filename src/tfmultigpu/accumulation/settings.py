"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.types import KerasOptimizer

_Items: TypeAlias = Mapping[object, object]
_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, tuple, np.generic)
_NAMESPACES = argparse.Namespace, types.SimpleNamespace, threading.local
_READERS = types.MethodType, functools.partial, property
_HAVE_NO_SETTINGS = {"keras", "tensorflow", "tfmultigpu", "numpy"} | sys.stdlib_module_names
INNER = "inner_optimizer."  # What settings inside a ``LossScaleOptimizer`` begin with.
_MOST = 10_000  # Items that are read at each step: a function may read an object that holds all.


class Settings:
    """Remembers the settings of an optimizer, at any depth.

    These are its attributes, of optimizers, schedules and objects of the user inside it and of
    their classes, the items of lists and dicts, and what a function reads from around it.
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
            for key, value in noted.read().items():
                name = noted.name_of(key)
                if name in self._ignored or _compat.is_for_checkpoints(str(key)):
                    continue
                if value is not None and not isinstance(value, _PLAIN):
                    value = f"{type(value).__name__} {id(value)}"
                values.setdefault(name, value)  # Of the object rather than of its class.
        return values

    def _differing(self) -> set[str]:
        different: set[str] = set()
        for noted in self._noted:
            now = noted.read()
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
        read: Returns the settings as they are now.
        items: The settings as they were.
    """

    path: str
    holder: object
    read: Callable[[], _Items]
    items: _Items

    def name_of(self, key: object) -> str:
        """Returns the name of a setting within the optimizer, for a person."""
        if isinstance(self.holder, (Mapping, Sequence)):
            return f"{self.path}[{key!r}]"
        if not key:
            return self.path
        name = str(key).removeprefix("_")
        return f"{self.path}.{name}" if self.path else name

    def has_objects_of(self, now: _Items) -> bool:
        """Returns whether there are the same objects now."""
        then = self.items
        return len(now) == len(then) and all(map(operator.is_, now.values(), then.values()))

    def differing(self, now: _Items) -> set[str]:
        """Returns the names of the settings that differ now."""
        names: set[str] = set()
        for key in now.keys() | self.items.keys():
            a, b = now.get(key, self), self.items.get(key, self)
            is_plain = type(a) is type(b) and isinstance(a, _PLAIN)
            if not (a is b or (is_plain and a == b) or _compat.is_for_checkpoints(str(key))):
                names.add(self.name_of(key))
        return names


def _settings_of(optimizer: KerasOptimizer) -> list[_Noted]:
    """Returns all that holds settings of an optimizer, each once, the nearest first."""
    waiting: list[tuple[str, object]] = [("", optimizer)]
    path, inner = "", unwrap_optimizer(optimizer)
    if inner is not optimizer:
        path = INNER
        waiting.append((path.removesuffix("."), inner))
    for number, part in enumerate(parts_of(inner)):
        waiting.append((f"{path}optimizers[{number}]", part))

    noted: dict[int, _Noted] = {}
    room = _MOST
    for path, holder in waiting:  # Which grows.
        if id(holder) in noted or room < 0:
            continue
        read = _reader_of(holder)
        kept = noted[id(holder)] = _Noted(path, holder, read, dict(read()))
        room -= len(kept.items)
        for key, value in kept.items.items():
            name = str(key)
            # Of the methods of a class Python itself calls most.
            is_of_python = name.startswith("__") and name != "__call__"
            if is_of_python or _compat.is_for_checkpoints(name) or not _holds_settings(value):
                continue
            waiting.append((kept.name_of(key), value))
        kind = holder if isinstance(holder, type) else type(holder)
        for base in filter(_holds_settings, kind.__mro__):
            waiting.append((path, base))
    return list(noted.values())


def _holds_settings(value: object) -> bool:
    """Returns whether a setting has settings inside it; variables and layers have none."""
    import keras

    others = keras.Variable, keras.Operation, keras.callbacks.Callback, tf.Module, tf.Tensor
    if isinstance(value, (str, bytes, *others)):
        return False
    if isinstance(value, (Mapping, Sequence)):
        variables = (keras.Variable, tf.Variable)
        items = list(_reader_of(value)().values()) if len(value) <= _MOST else [value]
        return not items or not all(isinstance(item, variables) for item in items)
    if isinstance(value, np.ndarray):
        return value.size <= _MOST
    kinds = keras.optimizers.Optimizer, keras.optimizers.schedules.LearningRateSchedule
    if isinstance(value, (*kinds, *_READERS, *_NAMESPACES, set)):
        return True
    if isinstance(value, types.ModuleType):
        return False
    if not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
        return False
    source = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(source.__module__).partition(".")[0] not in _HAVE_NO_SETTINGS


def _reader_of(holder: object) -> Callable[[], _Items]:
    """Returns what reads, at each step, what a holder has, by its name or place there."""
    if isinstance(holder, dict):
        return lambda: holder
    if isinstance(holder, Mapping):
        return lambda: dict(holder)
    if isinstance(holder, Sequence):
        return lambda: dict(enumerate(holder))
    if isinstance(holder, set):
        return lambda: {"": frozenset(holder)}
    if isinstance(holder, np.ndarray):
        return lambda: {"": holder.tobytes()}
    if isinstance(holder, types.FunctionType):
        return lambda: _read_by(holder)
    if isinstance(holder, types.MethodType):
        return lambda: {"": holder.__self__, holder.__name__: holder.__func__}
    if isinstance(holder, functools.partial):
        return lambda: {"func": holder.func, "args": holder.args, "keywords": holder.keywords}
    if isinstance(holder, property):
        return lambda: {"": holder.fget}
    slots = _slots_of(type(holder))
    if not slots:
        return functools.partial(vars, holder)  # type: ignore[return-value]
    return lambda: _with_slots(holder, slots)


def _with_slots(holder: object, slots: Sequence[str]) -> _Items:
    """Returns the attributes of an object some of which are in no ``__dict__``."""
    items: dict[object, object] = dict(getattr(holder, "__dict__", {}))
    return items | {name: getattr(holder, name) for name in slots if hasattr(holder, name)}


def _slots_of(kind: type) -> tuple[str, ...]:
    """Returns the attributes of objects of a class that are in no ``__dict__``."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _read_by(function: types.FunctionType) -> _Items:
    """Returns what a function reads from around it: globals, closures and defaults."""
    code, read = function.__code__, dict[object, object]()
    names, attributes = _names_in(code)
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            read[name] = value
            continue
        for attribute in attributes:  # Such as numbers in a module of the user.
            if attribute in vars(value):
                read[f"{name}.{attribute}"] = vars(value)[attribute]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            read[name] = cell.cell_contents
        except ValueError:  # What is defined later.
            continue
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    read.update(zip(code.co_varnames[first:], defaults, strict=False))
    read.update(function.__kwdefaults__ or {})
    return read


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the globals that code reads, functions in it too; and all names, also attributes."""
    names, attributes = dict[str, None](), dict.fromkeys(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names[instruction.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for known, more in zip((names, attributes), _names_in(inner), strict=True):
                known.update(dict.fromkeys(more))
    return tuple(names), tuple(attributes)
