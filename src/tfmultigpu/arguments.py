"""Checks of arguments that every package makes."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

__all__ = ["check_count", "count_option", "telling_swapped"]

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# The kinds of values that a public function takes under a name. A name that is not here, and a
# value of none of these kinds, is for the function itself to check.
_TAKES = {
    "model": ("model", "step"),  # A report on a step; others refuse it by themselves.
    "optimizer": ("optimizer",),
    "strategy": ("strategy",),
    "loss": ("loss", "text"),
    "step": ("step",),
    "data": ("dataset", "array"),
    "dataset": ("dataset", "array"),
    "y": ("array",),
    "batch": ("array",),
    "validation_data": ("dataset", "array"),
    "batch_size": ("number",),
    "epochs": ("number",),
    "steps": ("number",),
    "parts": ("number",),
    "startup_timeout": ("number",),
    "device": ("text",),
    "devices": ("number", "text"),
    "directory": ("text",),
    "prefer": ("text",),
    "communication": ("text",),
}
# Nothing happens without data, also where a default lets it have another name.
_NEEDED = ("data", "dataset")
_CLASSES = (
    ("strategy", "tensorflow", "distribute.Strategy"),
    ("dataset", "tensorflow", "data.Dataset"),
    ("model", "keras", "layers.Layer"),
    ("optimizer", "keras", "optimizers.Optimizer"),
    ("loss", "keras", "losses.Loss"),
    ("dataset", "keras", "utils.PyDataset"),
)
_OWN_CLASSES = {
    "TrainStep": "step",
    "ChainedStep": "step",
    "ShardedDataset": "dataset",
}


def check_count(
    name: str,
    value: Any,
    least: int = 1,
    *,
    other: str | None = None,
    error: type[Exception] | None = None,
) -> int:
    """Returns an argument that is a whole number, as Python's ``int``.

    Integers of NumPy, eager scalar tensors of integers and floats such as 3.0 count as well.

    Args:
        name: The name of the argument, for the error.
        value: What the caller received.
        least: The smallest number allowed.
        other: What the argument may be instead, for the error.
        error: The class of the error, if callers expect one of their own.

    Raises:
        TypeError: The value is not a whole number; or ``error``.
        ValueError: The value is below ``least``; or ``error``.

    Example:
        >>> check_count("epochs", 3)
        3
        >>> check_count("epochs", 0)
        Traceback (most recent call last):
        ValueError: epochs must be a whole number, at least 1. Received: epochs=0.
    """
    allowed = f"a whole number, at least {least}" + ("" if other is None else f", or {other}")
    wrong = f"{name} must be {allowed}. Received: {name}={value!r}."
    if isinstance(value, bool):
        raise (error or TypeError)(wrong)
    try:
        number = operator.index(value)
    except TypeError:
        if not isinstance(value, numbers.Real) or not float(value).is_integer():
            raise (error or TypeError)(wrong) from None
        number = int(float(value))
    if number < least:
        raise (error or ValueError)(wrong)
    return number


def count_option(least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """Returns the ``type`` of a command-line option that is a whole number.

    Args:
        least: The smallest number allowed.
        most: The largest number allowed.

    Example:
        >>> count_option()("12")
        12
    """

    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            limit = "" if most == math.inf else f" and at most {most}"
            raise argparse.ArgumentTypeError(
                f"must be a whole number, at least {least}{limit}. Received: {text!r}"
            )
        return int(text)

    return number


def telling_swapped(
    function: Callable[Parameters, Returned],
) -> Callable[Parameters, Returned]:
    """Makes a public function answer misplaced and misspelt arguments with the call to write.

    A model where a strategy belongs fails far from the call otherwise, with an ``AttributeError``.

    Args:
        function: A function or ``__init__``, which is not called inside a ``tf.function``.

    Example:
        >>> @telling_swapped
        ... def split(device, parts): ...
        >>> split(4, "CPU:0")
        Traceback (most recent call last):
        TypeError: split received a number as device and a text as parts, in each other's place. \
Received: device=4, parts='CPU:0'. Write split('CPU:0', 4).
    """
    signature = inspect.signature(function)
    of_class = function.__name__ == "__init__"
    name = function.__qualname__.split(".")[0] if of_class else function.__name__

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        try:
            given = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:
            _check_names(name, signature, kwargs)
            return function(*args, **kwargs)  # Raises Python's own words.
        if of_class:
            del given["self"]
        _check_places(name, signature, given)
        return function(*args, **kwargs)

    return checked


def _check_names(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    for one in given:
        if one not in signature.parameters:
            near = difflib.get_close_matches(one, signature.parameters, 1)
            if near:
                raise TypeError(
                    f"{name} has no argument {one!r}. Received: {one}={_short(given[one])}. "
                    f"Write {near[0]}={_short(given[one])}."
                )


def _check_places(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    kinds = {one: _kind(value) for one, value in given.items()}
    wrong = {
        one: kind
        for one, kind in kinds.items()
        if one in _TAKES and kind is not None and kind not in _TAKES[one]
    }
    if not wrong:
        return
    # Where each belongs: the first place that takes its kind and is free.
    right: dict[str, Any] = {one: given[one] for one in given if one not in wrong}
    moved: dict[str, str] = {}
    for one, kind in wrong.items():
        free = (two for two in signature.parameters if right.get(two) is None)
        place = next((two for two in free if kind in _TAKES.get(two, ())), None)
        if place is not None:
            right[place] = given[one]
            moved[one] = place
    if not moved:
        return  # The function itself knows best what it takes instead.
    said = " and ".join(f"{_with_article(kind)} as {one}" for one, kind in wrong.items())
    swapped = len(wrong) > 1 and set(moved.values()) == set(wrong)
    missing = {one for one in wrong if one not in moved or one in _NEEDED}
    place_of_each_other = ", in each other's place" if swapped else ""
    received = ", ".join(f"{one}={_short(given[one])}" for one in wrong)
    raise TypeError(
        f"{name} received {said}{place_of_each_other}. "
        f"Received: {received}. Write {_call(name, signature, right, missing)}."
    )


def _call(
    name: str, signature: inspect.Signature, right: Mapping[str, Any], missing: set[str]
) -> str:
    """Returns the call with each argument in its place, objects by the names of arguments."""
    written = []
    by_name = False
    for one, parameter in signature.parameters.items():
        if one == "self":
            continue
        needed = parameter.default is parameter.empty
        if one not in right and one not in missing and not needed:
            by_name = True
            continue
        value = right.get(one)
        plain = isinstance(value, (str, numbers.Number))
        text = repr(value) if plain else one
        by_name = by_name or parameter.kind is parameter.KEYWORD_ONLY
        written.append(f"{one}={text}" if by_name else text)
    return f"{name}({', '.join(written)})"


def _kind(value: Any) -> str | None:
    """Returns the kind of a value, as in ``_TAKES``; None if it is of no known kind."""
    for kind, module, path in _CLASSES:
        # An object of a module that was not imported does not exist.
        if module in sys.modules and isinstance(
            value, operator.attrgetter(path)(sys.modules[module])
        ):
            return kind
    if type(value).__module__.startswith("tfmultigpu."):
        return _OWN_CLASSES.get(type(value).__name__)
    if isinstance(value, (str, os.PathLike)):
        return "text"
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Number):
        return "number"
    # A scalar tensor is a number too, for functions that take one.
    is_scalar = getattr(value, "ndim", None) == 0
    return "array" if hasattr(value, "__array__") and not is_scalar else None


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _short(value: Any) -> str:
    if isinstance(value, (str, numbers.Number)):
        return repr(value)
    return f"<{type(value).__name__}>"
