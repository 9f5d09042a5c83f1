"""Where a callback keeps what it remembers: in itself, and in what it holds."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import io
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu._compat import is_part_of_keras
from tfmultigpu.steps.program_description import content_of

__all__ = ["Holder", "find_holders", "has_methods", "ids_of"]

_PLUMBING = {"params", "_model", "model"}
# Of TensorBoard: what lives in this process alone, the profiler and the files of this run.
_OF_THIS_PROCESS = {"_is_tracing", "_profiler_started", "_should_write_train_graph"}


@dataclasses.dataclass(frozen=True)
class Holder:
    """Something that has values: a callback, what one holds, or the closure of a function.

    Attributes:
        kind: The name of its class.
        one: The object itself.
        values: What it has, by name, other holders left out.
        put: Gives it another value.
        is_told: Whether values that cannot be saved are worth a word.
        others: What it holds that cannot be looked into, by name.
    """

    kind: str
    one: Any
    values: dict[str, Any]
    put: Callable[[str, Any], None]
    is_told: bool
    others: dict[str, str]


def find_holders(callback: Any, known: Iterable[int]) -> dict[str, Holder]:
    """Returns a callback and everything in it that has values, by the way to it; "" is itself.

    Args:
        callback: A callback.
        known: The ``id`` of what is saved elsewhere: other callbacks, the model, its variables.
    """
    found: dict[str, Holder] = {}
    _Search(found, set(known)).visit("", callback)
    return found


def ids_of(variables: Iterable[Any]) -> set[int]:
    """Returns the ``id`` of variables, those inside of Keras variables too."""
    found = set()
    for variable in variables:
        found.add(id(variable))
        if not isinstance(variable, tf.Variable):
            found.add(id(variable.value))
    return found


def has_methods(one: Any) -> bool:
    """Returns whether an object has ``state()`` and ``set_state(state)``."""
    methods = (getattr(type(one), name, None) for name in ("state", "set_state"))
    return all(callable(method) for method in methods)


class _Search:
    """Looks through a callback; each object is found once."""

    def __init__(self, found: dict[str, Holder], seen: set[int]) -> None:
        self._found = found
        self._seen = seen

    def visit(self, path: str, one: Any) -> None:
        """Notes a callback, and what it holds."""
        import keras

        self._seen.add(id(one))
        own = not is_part_of_keras(type(one))
        holder = Holder(type(one).__name__, one, {}, functools.partial(setattr, one), own, {})
        self._found[path] = holder
        if has_methods(one):
            return
        given, assigned = _given(type(one)), _assigned(type(one))
        skipped = set(_PLUMBING)
        if isinstance(one, keras.callbacks.TensorBoard):
            skipped |= _OF_THIS_PROCESS
        for name, value in vars(one).items():
            if name in skipped:
                continue
            # What a constructor of Keras was given is never state, unless a subclass changes it.
            if name in given and name not in assigned and not (not own and callable(value)):
                continue
            self._look(holder, path, name, value)
        for function in _own_methods(type(one)):
            self._look_at_module(path, function)
        if not own:  # What Keras itself made there it looks after.
            for name in set(holder.others) - given:
                del holder.others[name]

    def _look(self, holder: Holder, path: str, name: str, value: Any) -> None:
        """Notes what is held under a name."""
        if id(value) in self._seen:
            return
        inner = f"{path}.{name}" if path else name
        if _is_callback(value):
            if not hasattr(value, "on_fit_exit"):
                self.visit(inner, value)
        elif (variables := _variables_in(value)) is not None:
            self._seen.add(id(value))
            own = [one for one in variables if id(one) not in self._seen]
            if own:
                self._note(inner, value, {"variables": own}, functools.partial(_check, own))
        elif any(_is_callback(one) or _variables_in(one) is not None for one in _items(value)):
            self._seen.add(id(value))
            items = dict(enumerate(_items(value)))
            self._visit_all(inner, value, {str(i): one for i, one in items.items()}, _setter(value))
        elif isinstance(value, types.FunctionType) and not is_part_of_keras(value):
            self._seen.add(id(value))
            self._look_at_module(inner, value)
            closure = value.__closure__ or ()
            cells = dict(zip(value.__code__.co_freevars, closure, strict=True))
            contents = {cell_name: content_of(cell) for cell_name, cell in cells.items()}

            def put(cell_name: str, content: Any) -> None:
                cells[cell_name].cell_contents = content

            if cells:
                self._visit_all(inner, value, contents, put)
        elif isinstance(value, functools.partial):
            self._look(holder, path, name, value.func)
        elif isinstance(value, types.MethodType) or _is_own_function_object(value):
            owner = getattr(value, "__self__", value)
            known = id(owner) in self._seen or _is_tool(owner)
            if not known and getattr(owner, "__dict__", None):
                holder.others[name] = type(owner).__name__
        elif not _is_tool(value) and not self._is_known_list(value):
            holder.values[name] = value

    def _look_at_module(self, path: str, function: types.FunctionType) -> None:
        """Notes the variables of a module that a function names, and the values that it assigns."""
        import keras

        names = function.__globals__
        assigned = set(_names_in(function.__code__, "STORE_GLOBAL"))
        read = set(_names_in(function.__code__, "LOAD_GLOBAL"))
        found = {
            name: names[name]
            for name in sorted((assigned | read) & names.keys())
            if name in assigned or isinstance(names[name], (tf.Variable, keras.Variable))
        }
        if found := {name: value for name, value in found.items() if id(value) not in self._seen}:
            inner = f"{path}.{function.__module__}" if path else function.__module__
            self._visit_all(inner, function, found, names.__setitem__)

    def _visit_all(
        self, path: str, one: Any, items: dict[str, Any], put: Callable[[str, Any], None]
    ) -> None:
        holder = self._note(path, one, {}, put)
        for name, value in items.items():
            self._look(holder, path, name, value)

    def _note(
        self, path: str, one: Any, values: dict[str, Any], put: Callable[[str, Any], None]
    ) -> Holder:
        self._found[path] = Holder(type(one).__name__, one, values, put, True, {})
        return self._found[path]

    def _is_known_list(self, value: Any) -> bool:
        """Returns whether a list holds variables of the model alone, which are saved with it."""
        items = value if type(value) in (list, tuple) else ()
        return bool(items) and all(id(one) in self._seen for one in items)


def _check(present: list[Any], _: str, assigned: list[Any]) -> None:
    """Checks that all variables of something got a value; each has it by now."""
    if len(present) != len(assigned):
        raise ValueError(f"it had {len(assigned)} variables, and now has {len(present)}")


def _items(value: Any) -> list[Any]:
    import keras

    if isinstance(value, keras.callbacks.CallbackList):
        return list(value.callbacks)
    if type(value) is dict:
        return list(value.values())
    return list(value) if type(value) in (list, tuple) else []


def _setter(value: Any) -> Callable[[str, Any], None]:
    """Gives a container of callbacks another item in a place."""

    def put(place: str, item: Any) -> None:
        if isinstance(value, dict):
            value[list(value)[int(place)]] = item
        elif isinstance(value, list):
            value[int(place)] = item

    return put


def _given(kind: type) -> set[str]:
    """Returns what constructors of Keras take, of all classes that a class is made of."""
    return {
        name
        for one in kind.__mro__
        if is_part_of_keras(one) and "__init__" in vars(one)
        for name in inspect.signature(vars(one)["__init__"]).parameters
    }


def _assigned(kind: type) -> set[str]:
    """Returns the attributes that methods of a class assign, without Keras' and constructors."""
    return {name for one in _own_methods(kind) for name in _names_in(one.__code__, "STORE_ATTR")}


def _own_methods(kind: type) -> list[types.FunctionType]:
    """Returns the methods of a class that are not Keras', without constructors."""
    return [
        method
        for one in kind.__mro__
        if not is_part_of_keras(one)
        for name, method in vars(one).items()
        if isinstance(method, types.FunctionType) and name != "__init__"
    ]


def _names_in(code: types.CodeType, operation: str) -> Iterator[str]:
    """Yields the names that an operation has in a function and in those written inside it."""
    for one in dis.get_instructions(code):
        if one.opname == operation:
            yield one.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner, operation)


def _is_callback(value: Any) -> bool:
    import keras

    return isinstance(value, keras.callbacks.Callback)


def _variables_in(value: Any) -> list[Any] | None:
    """The variables of a model, or of something like it; None where it is something else."""
    import keras

    kinds = (keras.Layer, keras.optimizers.Optimizer, keras.Metric, tf.Module)
    if not isinstance(value, kinds) or isinstance(value, keras.callbacks.Callback):
        return None
    return list(value.variables)


def _is_own_function_object(value: Any) -> bool:
    """Returns whether an object of a class of the user's is called like a function."""
    return callable(value) and not _is_tool(value)


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
        keras.Loss,
        keras.optimizers.schedules.LearningRateSchedule,
        tf.data.Dataset,
        tf.distribute.Strategy,
        tf.distribute.DistributedDataset,
        tf.summary.SummaryWriter,
    )
    return isinstance(value, things) or hasattr(value, "get_concrete_function")
