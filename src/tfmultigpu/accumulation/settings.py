"""Settings of an optimizer, which a trace takes in as they are: whether they have changed since."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import operator
import sys
import types
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.accumulation.loss_scale import parts_of, unwrap_optimizer
from tfmultigpu.types import KerasOptimizer

_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, tuple, np.generic)
_NAMESPACES = argparse.Namespace, types.SimpleNamespace
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
            for key, value in _items(noted.holder).items():
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
        kept = noted[id(holder)] = _Noted(path, holder, dict(_items(holder)))
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

    if isinstance(value, (list, tuple, dict)):
        variables = (keras.Variable, tf.Variable)
        items = list(_items(value).values()) if len(value) <= _MOST else [value]
        return not items or not all(isinstance(item, variables) for item in items)
    if isinstance(value, np.ndarray):
        return value.size <= _MOST
    kinds = keras.optimizers.Optimizer, keras.optimizers.schedules.LearningRateSchedule
    readers = types.MethodType, functools.partial
    if isinstance(value, (*kinds, *readers, *_NAMESPACES, set)):
        return True
    others = keras.Variable, keras.Operation, keras.callbacks.Callback, tf.Module, tf.Tensor
    if isinstance(value, (*others, types.ModuleType)) or not hasattr(value, "__dict__"):
        return False
    source = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(source.__module__).partition(".")[0] not in _HAVE_NO_SETTINGS


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
    if isinstance(holder, types.MethodType):
        return {"": holder.__self__, holder.__name__: holder.__func__}
    if isinstance(holder, functools.partial):
        return {"func": holder.func, "args": holder.args, "keywords": holder.keywords}
    return vars(holder)  # type: ignore[return-value]


def _read_by(function: types.FunctionType) -> dict[object, object]:
    """Returns what a function reads from around it: globals, closures and defaults."""
    code, read = function.__code__, dict[object, object]()
    for name in _globals_of(code):
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            read[name] = value
            continue
        for attribute in code.co_names:  # Such as numbers in a module of the user.
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
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the globals that code reads; ``co_names`` has attributes too."""
    names = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            names.append(instruction.argval)
    return tuple(names)
