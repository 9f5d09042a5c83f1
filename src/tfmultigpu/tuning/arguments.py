"""Check of arguments that count something."""

from __future__ import annotations

from numbers import Integral
from typing import Any

__all__ = ["check_count"]


def check_count(name: str, value: Any) -> None:
    """Checks that an argument is a whole number, at least 1.

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1. Received: {name}={value!r}.")
