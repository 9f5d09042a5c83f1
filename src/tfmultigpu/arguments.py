"""Checks of arguments that every package makes."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any


def check_count(
    name: str,
    value: Any,
    least: int = 1,
    *,
    other: str | None = None,
    error: type[Exception] | None = None,
) -> int:
    """Returns an argument that is a whole number of any kind, also 3.0 or a tensor."""
    allowed = f"a whole number, at least {least}" + ("" if other is None else f", or {other}")
    wrong = f"{name} must be {allowed}. Received: {name}={value!r}."
    try:
        number = operator.index(value)
    except TypeError:
        if not isinstance(value, numbers.Real) or not float(value).is_integer():
            raise (error or TypeError)(wrong) from None
        number = int(float(value))
    if isinstance(value, bool):
        raise (error or TypeError)(wrong)
    if number < least:
        raise (error or ValueError)(wrong)
    return number


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
            f"{name} must be a positive, finite number. Received: {name}={value!r}. {write}"
        )
    return number
