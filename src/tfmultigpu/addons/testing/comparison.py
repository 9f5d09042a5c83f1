"""Comparison of two trainings: the one ``difference`` of two arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


class ReplicaInvarianceError(AssertionError):
    """Training on several replicas differs from training on one device."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity.

    Attributes:
        quantity: The name of the quantity, such as ``"loss"`` or ``"Sequential: dense/kernel"``.
        step: The step after which the difference was largest, from 1 on; 0 is before training.
        amount: The size of the difference: absolute below one, relative above. Infinity if one side
            only is NaN or infinite, or if the shapes differ.
        place: The index in the array.
        expected: The value on one device.
        actual: The value on the replicas.
    """

    quantity: str
    step: int
    amount: float
    place: tuple[int, ...] = ()
    expected: Any = None
    actual: Any = None

    def __str__(self) -> str:
        """Formats the difference as one line."""
        index = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return (
            f"{self.quantity}{index}: {self.actual!s} instead of {self.expected!s}, "
            f"off by {self.amount:.1e}"
        )


def difference(expected: Any, actual: Any, quantity: str = "", step: int = 0) -> Difference:
    """Returns the largest difference between two arrays of numbers, strings or booleans."""
    one, other = np.asarray(expected), np.asarray(actual)
    if one.shape != other.shape:
        return Difference(quantity, step, np.inf, (), f"shape {one.shape}", f"shape {other.shape}")
    if not one.size:
        return Difference(quantity, step, 0.0)
    if one.dtype.kind in "OSUb":
        amounts = np.where(one == other, 0.0, np.inf)
    else:
        wide, found = one.astype("float64"), other.astype("float64")
        with np.errstate(invalid="ignore", over="ignore"):
            amounts = np.abs(wide - found) / np.maximum(1.0, np.abs(wide))
        same = (wide == found) | (np.isnan(wide) & np.isnan(found))
        amounts = np.where(same, 0.0, np.where(np.isfinite(amounts), amounts, np.inf))
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(amounts)), amounts.shape))
    return Difference(quantity, step, float(amounts[place]), place, one[place], other[place])
