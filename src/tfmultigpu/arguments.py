"""Checks of arguments that every package makes, and values of a user as a message shows them."""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

from tfmultigpu.errors import TfMultiGpuError

_PARTS_SHOWN, _LETTERS_SHOWN = 4, 200


def check_count(
    name: str,
    value: Any,
    least: int = 1,
    *,
    other: str | None = None,
    error: type[Exception] | None = None,
) -> int:
    """Returns an argument that is a whole number of any kind, also 3.0 or a tensor."""
    number = _whole_number(value)
    if number is not None and number >= least:
        return number

    allowed = f"a whole number, at least {least}"
    if other is not None:
        allowed += f", or {other}"
    if error is None:
        error = TypeError if number is None else ValueError
    what = f"{name} must be {allowed}."
    received = f"{name}={brief(value)}"
    if issubclass(error, TfMultiGpuError):
        raise error(what, received)
    raise error(str(TfMultiGpuError(what, received)))


def _whole_number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, numbers.Real) and float(value).is_integer():
            return int(float(value))
    return None


def check_positive(name: str, value: Any, write: str) -> float:
    """Returns an argument that is a positive, finite number of any kind, also a tensor.

    ``write`` is the line to write instead.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            f"{name} must be a positive, finite number. Received: {name}={brief(value)}. {write}"
        )
    return number


def check_callable(
    name: str,
    function: Any,
    *arguments: str,
    write: str,
    error: type[Exception] = TypeError,
) -> None:
    """Checks that a function of the user can be called with arguments, before it is called.

    Args:
        name: The argument that the function was given as.
        function: The function; what has no signature, such as code in C, is taken as it is.
        *arguments: The names of what it will be called with, by position.
        write: What to write instead.
        error: The class of the error.
    """
    shown = brief(function)
    if callable(function):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*arguments)
        except TypeError:
            shown = f"{name_of(function)}{signature}"
        else:
            return
    raise error(
        f"{name} is a function that is called as {name}({', '.join(arguments)}). Received: "
        f"{name}={shown}. Write {write}"
    )


def name_of(function: Any) -> str:
    """Returns the name of a function, also of one with fixed arguments, or of an object's class."""
    function = getattr(function, "func", function)  # Of a functools.partial.
    return getattr(function, "__name__", type(function).__name__)


def brief(value: Any) -> str:
    """Returns a value of the user in a few words: never the data that it holds."""
    kind = type(value).__name__
    if kind in ("EagerTensor", "SymbolicTensor"):
        kind = "Tensor"
    if isinstance(value, Mapping):
        first = itertools.islice(value.items(), _PARTS_SHOWN)
        return "{" + _joined([f"{brief(key)}: {brief(part)}" for key, part in first], value) + "}"
    if type(value) in (list, tuple, set, frozenset):
        left, right = {"list": ("[", "]"), "tuple": ("(", ")")}.get(kind, ("{", "}"))
        first = itertools.islice(value, _PARTS_SHOWN)
        return left + _joined([brief(part) for part in first], value) + right
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type) and len(shape) > 0:
        dtype = getattr(value, "dtype", None)
        lengths = ", ".join(map(str, shape))
        of_dtype = "" if dtype is None else f", {getattr(dtype, 'name', dtype)}"
        return f"{kind} of shape ({lengths}){of_dtype}"
    if inspect.isroutine(value):
        return f"the function {name_of(value)}"
    text = repr(value)
    if isinstance(value, (str, bytes)):
        return text if len(text) <= _LETTERS_SHOWN else f"{text[:_LETTERS_SHOWN]}..."
    is_long = len(text) > _LETTERS_SHOWN or "\n" in text or " object at 0x" in text
    return kind if is_long else text


def _joined(shown: list[str], whole: Any) -> str:
    if len(whole) > len(shown):
        shown.append(f"... {len(whole)} in all")
    return ", ".join(shown)
