"""Search for the values a callback remembers, in itself and in the objects it holds."""

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

_SET_BY_KERAS = {"params", "_model", "model"}
# Attributes of TensorBoard that describe this process: its profiler and its files.
_OF_THIS_PROCESS = {"_is_tracing", "_profiler_started", "_should_write_train_graph"}


@dataclasses.dataclass(frozen=True)
class Holder:
    """An object with values: a callback, an object inside one, or the closure of a function.

    Attributes:
        kind: The name of its class.
        one: The object itself.
        values: Its values by name, without other holders.
        assign: Assigns a value to a name.
        reports_unsaved: Whether to log values that cannot be saved.
        opaque: The classes of held objects that the search cannot enter, by name.
    """

    kind: str
    one: Any
    values: dict[str, Any]
    assign: Callable[[str, Any], None]
    reports_unsaved: bool
    opaque: dict[str, str]


def find_holders(callback: Any, known: Iterable[int]) -> dict[str, Holder]:
    """Returns the holders in a callback by their path; the callback itself has the path "".

    Args:
        callback: A callback.
        known: The ``id`` of objects saved elsewhere: other callbacks, the model, its variables.
    """
    found: dict[str, Holder] = {}
    _Search(found, set(known)).visit("", callback)
    return found


def ids_of(variables: Iterable[Any]) -> set[int]:
    """Returns the ``id`` of variables and of the variables inside Keras variables."""
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
    """A search through one callback that finds each object once."""

    def __init__(self, found: dict[str, Holder], seen: set[int]) -> None:
        self._found = found
        self._seen = seen

    def visit(self, path: str, one: Any) -> None:
        """Records a callback and the objects it holds."""
        import keras

        self._seen.add(id(one))
        custom = not is_part_of_keras(type(one))
        holder = Holder(type(one).__name__, one, {}, functools.partial(setattr, one), custom, {})
        self._found[path] = holder
        if has_methods(one):
            return
        given, assigned = _constructor_arguments(type(one)), _assigned_attributes(type(one))
        skipped = set(_SET_BY_KERAS)
        if isinstance(one, keras.callbacks.TensorBoard):
            skipped |= _OF_THIS_PROCESS
        for name, value in vars(one).items():
            if name in skipped:
                continue
            # Arguments of a Keras constructor are not state, unless a subclass changes them.
            if name in given and name not in assigned and (custom or not callable(value)):
                continue
            self._visit_value(holder, path, name, value)
        for function in _own_methods(type(one)):
            self._visit_module(path, function)
        if not custom:  # Keras manages the objects it made itself.
            for name in set(holder.opaque) - given:
                del holder.opaque[name]

    def _visit_value(self, holder: Holder, path: str, name: str, value: Any) -> None:
        """Records the value that a holder has under a name."""
        if id(value) in self._seen:
            return
        inner = f"{path}.{name}" if path else name
        if _is_callback(value):
            if not hasattr(value, "on_fit_exit"):
                self.visit(inner, value)
        elif (variables := _variables_in(value)) is not None:
            self._seen.add(id(value))
            new = [one for one in variables if id(one) not in self._seen]
            if new:
                check = functools.partial(_check_assigned, new)
                self._record(inner, value, {"variables": new}, check)
        elif any(_is_callback(one) or _variables_in(one) is not None for one in _items(value)):
            self._seen.add(id(value))
            items = {str(i): one for i, one in enumerate(_items(value))}
            self._visit_all(inner, value, items, _setter(value))
        elif isinstance(value, types.FunctionType) and not is_part_of_keras(value):
            self._seen.add(id(value))
            self._visit_module(inner, value)
            closure = value.__closure__ or ()
            cells = dict(zip(value.__code__.co_freevars, closure, strict=True))
            contents = {cell_name: content_of(cell) for cell_name, cell in cells.items()}

            def assign(cell_name: str, content: Any) -> None:
                cells[cell_name].cell_contents = content

            if cells:
                self._visit_all(inner, value, contents, assign)
        elif isinstance(value, functools.partial):
            self._visit_value(holder, path, name, value.func)
        elif isinstance(value, types.MethodType) or _is_own_function_object(value):
            owner = getattr(value, "__self__", value)
            known = id(owner) in self._seen or _is_tool(owner)
            if not known and getattr(owner, "__dict__", None):
                holder.opaque[name] = type(owner).__name__
        elif not _is_tool(value) and not self._is_known_list(value):
            holder.values[name] = value

    def _visit_module(self, path: str, function: types.FunctionType) -> None:
        """Records the module variables a function names and the module values it assigns."""
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
        self, path: str, one: Any, items: dict[str, Any], assign: Callable[[str, Any], None]
    ) -> None:
        holder = self._record(path, one, {}, assign)
        for name, value in items.items():
            self._visit_value(holder, path, name, value)

    def _record(
        self, path: str, one: Any, values: dict[str, Any], assign: Callable[[str, Any], None]
    ) -> Holder:
        self._found[path] = Holder(type(one).__name__, one, values, assign, True, {})
        return self._found[path]

    def _is_known_list(self, value: Any) -> bool:
        """Returns whether a list holds only objects that are already found or saved elsewhere."""
        items = value if type(value) in (list, tuple) else ()
        return bool(items) and all(id(one) in self._seen for one in items)


def _check_assigned(present: list[Any], _: str, assigned: list[Any]) -> None:
    """Checks that each variable got a value; ``unpack`` has assigned the values in place."""
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
    """Returns a function that replaces an item of a list or dict by its number."""

    def assign(place: str, item: Any) -> None:
        if isinstance(value, dict):
            value[list(value)[int(place)]] = item
        elif isinstance(value, list):
            value[int(place)] = item

    return assign


def _constructor_arguments(kind: type) -> set[str]:
    """Returns the arguments of all Keras constructors among the bases of a class."""
    return {
        name
        for one in kind.__mro__
        if is_part_of_keras(one) and "__init__" in vars(one)
        for name in inspect.signature(vars(one)["__init__"]).parameters
    }


def _assigned_attributes(kind: type) -> set[str]:
    """Returns the attributes that the user's methods of a class assign, constructors excluded."""
    return {name for one in _own_methods(kind) for name in _names_in(one.__code__, "STORE_ATTR")}


def _own_methods(kind: type) -> list[types.FunctionType]:
    """Returns the user's methods of a class, without Keras' methods and constructors."""
    return [
        method
        for one in kind.__mro__
        if not is_part_of_keras(one)
        for name, method in vars(one).items()
        if isinstance(method, types.FunctionType) and name != "__init__"
    ]


def _names_in(code: types.CodeType, operation: str) -> Iterator[str]:
    """Yields the names an operation uses in a function and in its nested functions."""
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
    """Returns the variables of a layer, optimizer, metric or module; None for other objects."""
    import keras

    kinds = (keras.Layer, keras.optimizers.Optimizer, keras.Metric, tf.Module)
    if not isinstance(value, kinds) or isinstance(value, keras.callbacks.Callback):
        return None
    return list(value.variables)


def _is_own_function_object(value: Any) -> bool:
    """Returns whether a value is a callable object of a user's class."""
    return callable(value) and not _is_tool(value)


def _is_tool(value: Any) -> bool:
    """Returns whether training uses a value but does not change it."""
    import keras

    tools = (
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
    return isinstance(value, tools) or hasattr(value, "get_concrete_function")
