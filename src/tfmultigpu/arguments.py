"""Checks of arguments that every package makes."""

from __future__ import annotations

import argparse
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

__all__ = ["check_count", "count_option"]


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
