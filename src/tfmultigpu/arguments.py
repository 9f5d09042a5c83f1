"""Checks of arguments that every package makes."""

from __future__ import annotations

import math
import numbers
import operator

from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.types import Untyped


def check_count(
    name: str,
    value: Untyped,
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
    received = f"{name}={value!r}"
    if issubclass(error, TfMultiGpuError):
        raise error(what, received)
    raise error(str(TfMultiGpuError(what, received)))


def _whole_number(value: Untyped) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        if isinstance(value, numbers.Real) and float(value).is_integer():
            return int(float(value))
    return None


def check_positive(name: str, value: Untyped, write: str) -> float:
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
