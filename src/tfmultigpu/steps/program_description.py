"""Descriptions of a model, a loss and an optimizer that are equal if two processes made the same.

They hold nothing that differs between processes of one program: no address, no file, no order of a
set, no name that Keras counts up, no seed (TensorFlow sends the first worker's values to all).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.strategies.scopes import all_layers

__all__ = ["describe_model", "describe_value"]

# Names count up with the layers that were made before; a module may be `__main__` for one worker.
_NOT_COMPARED = frozenset({"name", "module", "registered_name", "seed", "build_config"})
# Their versions are compared when the workers meet.
_LIBRARIES = ("keras", "tensorflow")
_COUNTER = re.compile(r"_\d+(?=/|$)")
_DEEPEST = 30
_PLAIN = (bool, int, float, complex, str, bytes)


def describe_model(model: Any) -> list[str]:
    """Returns a line for each layer of a model and for each of its weights.

    Args:
        model: A Keras model or layer, built.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> describe_model(model)[-1]
        'weight 0: sequential/dense/kernel (2, 1) float32 trained'
    """
    layers = [f"layer {place}: {_layer(layer)}" for place, layer in enumerate(all_layers(model))]
    weights = [
        f"weight {place}: {_COUNTER.sub('', str(one.path))} {tuple(one.shape)} "
        f"{tf.as_dtype(one.dtype).name} {'trained' if one.trainable else 'not trained'}"
        for place, one in enumerate(model.weights)
    ]
    return [*layers, *weights]


def describe_value(value: Any, depth: int = 0) -> str:
    """Returns what a setting, a function or an object of Keras is.

    A function is described by its name and a digest of its code, an object by its class and, if it
    has one, its configuration. Anything else is described by its class alone.

    Example:
        >>> describe_value({"b": {3, 1}, "a": (0.5, None)})
        '{a: [0.5, None], b: {1, 3}}'
    """
    if depth > _DEEPEST:
        return "..."
    inner = functools.partial(describe_value, depth=depth + 1)
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, Mapping):
        items = [
            f"{key}: {inner(one)}" for key, one in value.items() if str(key) not in _NOT_COMPARED
        ]
        return "{" + ", ".join(sorted(items)) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(inner, value)) + "]"
    if isinstance(value, (tf.DType, tf.TensorShape)):
        return str(value)
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} {_digest(value.tobytes())}"
    if isinstance(value, functools.partial):
        return f"partial of {inner([value.func, list(value.args), value.keywords])}"
    if isinstance(value, types.MethodType):
        return f"{_class_of(value.__self__)}.{inner(value.__func__)}"
    value = getattr(value, "python_function", value)  # Of a tf.function.
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, type):
        return value.__qualname__
    return _object(value, depth)


def _layer(layer: Any) -> str:
    """A layer; of a model its wiring, because its layers have lines of their own."""
    config = _config(layer)
    if config is not None and isinstance(config.get("layers"), list):
        config = {"wiring": _wiring(config["layers"])}
    functions = {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, types.FunctionType)
        and not name.startswith("_")
        # Of Keras' own functions the configuration says which.
        and not _is_of_a_library(value.__module__)
    }
    frozen = "" if layer.trainable else " frozen"
    parts = [describe_value(part) for part in (config, functions) if part]
    return " ".join([_class_of(layer) + frozen, *parts, *_own_code(layer, "call")])


def _wiring(layers: list[Any]) -> list[Any]:
    """Returns the inputs of each layer, by places instead of names."""
    entries = [entry for entry in layers if isinstance(entry, dict)]
    names = [str(entry.get("name", entry.get("config", {}).get("name"))) for entry in entries]
    places = {name: place for place, name in enumerate(names)}
    return [_renamed(entry.get("inbound_nodes"), places) for entry in entries]


def _renamed(value: Any, places: Mapping[str, int]) -> Any:
    if isinstance(value, str):
        return f"#{places[value]}" if value in places else value
    if isinstance(value, Mapping):
        return {key: _renamed(one, places) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(one, places) for one in value]
    return value


def _object(value: Any, depth: int) -> str:
    import keras

    config = _config(value)
    if isinstance(value, keras.losses.Loss):
        # Its configuration leaves out what some were made with, such as delta of Huber.
        plain = {k: v for k, v in vars(value).items() if isinstance(v, (*_PLAIN, dict))}
        config = {**(config or {}), "made with": plain}
    described = [] if config is None else [describe_value(config, depth + 1)]
    functions = [
        describe_value(one, depth + 1)
        for name, one in sorted(getattr(value, "__dict__", {}).items())
        if isinstance(one, types.FunctionType) and name in ("fn", "_fn", "function", "activation")
    ]
    code = _own_code(value, "call", "__call__", "update_step")
    return " ".join([_class_of(value), *described, *functions, *code])


def _config(value: Any) -> dict[str, Any] | None:
    """The configuration of an object; None where it has none that can be had."""
    if isinstance(value, type) or not callable(getattr(value, "get_config", None)):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of functions that it would store.
            config = value.get_config()
    except Exception:  # Code of a user, or of Keras for a lambda without a file: it has none then.
        return None
    return _comparable(dict(config)) if isinstance(config, Mapping) else None


def _comparable(value: Any) -> Any:
    """Keras stores a lambda with the path of its file; its code is described by itself.

    Of an activation it stores only what is inside.
    """
    if isinstance(value, Mapping):
        kind = str(value.get("class_name"))
        if kind == "__lambda__" or value.keys() == {"value"}:
            return "lambda"
        if kind.endswith("DTypePolicy"):  # Its name is all there is to it.
            return f"{kind} {value.get('config')}"
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    return value


def _own_code(value: Any, *methods: str) -> Iterator[str]:
    """The code of a class that is not Keras' own."""
    for name in methods:
        for base in type(value).__mro__:
            method = base.__dict__.get(name)
            if method is not None:
                own = not _is_of_a_library(base.__module__)
                if own and isinstance(method, types.FunctionType):
                    yield f"{name} {_digest(_code(method.__code__))}"
                break


def _function(function: types.FunctionType, depth: int) -> str:
    if _is_of_a_library(function.__module__):
        return function.__qualname__
    # Numbers that a function was made with count. What else it holds may be of one process.
    cells = [_content_of(cell) for cell in function.__closure__ or ()]
    cells += [function.__globals__.get(name) for name in function.__code__.co_names]
    numbers = [one for one in cells if isinstance(one, float)]
    inside = [_digest(_code(one.__code__)) for one in cells if isinstance(one, types.FunctionType)]
    defaults = [function.__defaults__ or (), function.__kwdefaults__ or {}]
    made_with = describe_value([numbers, inside, defaults], depth + 1)
    return f"{function.__qualname__} {_digest(_code(function.__code__))} {made_with}"


def _is_of_a_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _content_of(cell: types.CellType) -> Any:
    """Returns what a closure has in a cell; None before it was given a value."""
    try:
        return cell.cell_contents
    except ValueError:  # Nothing is in it yet.
        return None


def _code(code: types.CodeType) -> bytes:
    """Returns the code of a function without file and line."""
    constants = [
        _digest(_code(one)) if isinstance(one, types.CodeType) else describe_value(one)
        for one in code.co_consts
    ]
    counts = code.co_argcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return repr((code.co_code, constants, counts, names)).encode()


def _class_of(value: Any) -> str:
    return str(inspect.unwrap(type(value)).__qualname__)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
