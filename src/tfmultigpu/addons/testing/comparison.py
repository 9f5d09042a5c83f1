"""Comparison of two trainings, and the report of their differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Difference", "Differences", "InvarianceReport", "ReplicaInvarianceError", "difference"]

_SHOWN = 8


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


@dataclasses.dataclass(frozen=True)
class InvarianceReport:
    """Differences between training on replicas and on one device; prints as a table.

    Attributes:
        where: The strategies that were compared.
        steps: Number of optimizer steps.
        tolerance: The largest difference allowed.
        differences: The largest difference of each quantity.
        first: The differences above the tolerance, after the first step that has any.
        not_finite: The quantities that were infinite or NaN on one device.
    """

    where: str
    steps: int
    tolerance: float
    differences: Mapping[str, Difference]
    first: tuple[Difference, ...] = ()
    not_finite: tuple[str, ...] = ()

    @property
    def largest(self) -> Difference | None:
        """The largest difference of all; None if nothing was compared."""
        return max(self.differences.values(), key=lambda one: one.amount, default=None)

    def __str__(self) -> str:
        """Formats the first differences, then the largest ones."""
        lines = [f"{self.where}, {self.steps} steps, tolerance {self.tolerance:.0e}"]
        if self.first:
            lines.append(f"First differences, after step {self.first[0].step}:")
            lines += [f"  {one}" for one in self.first[:_SHOWN]]
            if len(self.first) > _SHOWN:
                lines.append(f"  and {len(self.first) - _SHOWN} more")
        if self.not_finite:
            names = ", ".join(self.not_finite[:_SHOWN])
            lines.append(f"Not finite on one device, so hardly compared: {names}")
        ordered = sorted(self.differences.values(), key=lambda one: -one.amount)
        unequal = [one for one in ordered if one.amount > 0]
        equal = len(ordered) - len(unequal)
        lines.append(f"Equal to the bit: {equal} of {len(ordered)} quantities.")
        if unequal:
            lines.append("Largest differences:")
        lines += [
            f"  {one.amount:8.1e}  step {one.step:3}  {one.quantity}" for one in unequal[:_SHOWN]
        ]
        if len(unequal) > _SHOWN:
            lines.append(f"  and {len(unequal) - _SHOWN} smaller ones")
        return "\n".join(lines)


class Differences:
    """Collects the largest difference of each quantity, and the first ones above the tolerance."""

    def __init__(self, tolerance: float, tolerances: Mapping[str, float]) -> None:
        """Starts without differences.

        Args:
            tolerance: The largest difference allowed.
            tolerances: The same for quantities whose name contains a text.
        """
        self.largest: dict[str, Difference] = {}
        self.first: list[Difference] = []
        self.not_finite: dict[str, None] = {}
        self.tolerance = tolerance
        self._tolerances = tolerances

    def add(self, quantity: str, step: int, expected: Any, actual: Any) -> None:
        """Compares one quantity after a step."""
        found = difference(expected, actual, quantity, step)
        if not _is_finite(expected):
            self.not_finite[quantity] = None
        known = self.largest.get(quantity)
        if known is None or found.amount > known.amount:
            self.largest[quantity] = found
        allowed = [limit for text, limit in self._tolerances.items() if text in quantity]
        too_large = found.amount > max(allowed, default=self.tolerance)
        if too_large and (not self.first or self.first[0].step == step):
            self.first.append(found)


def difference(expected: Any, actual: Any, quantity: str = "", step: int = 0) -> Difference:
    """Returns the largest difference between two arrays of numbers, strings or booleans.

    Example:
        >>> difference([1.0, 4.0], [1.0, 5.0], "loss").amount
        0.25
    """
    one, other = np.asarray(expected), np.asarray(actual)
    if one.shape != other.shape:
        return Difference(quantity, step, np.inf, (), f"shape {one.shape}", f"shape {other.shape}")
    if not one.size:
        return Difference(quantity, step, 0.0)
    amounts = _amounts(one, other)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(amounts)), amounts.shape))
    return Difference(quantity, step, float(amounts[place]), place, one[place], other[place])


def _amounts(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> Any:
    """Returns the differences of the elements, absolute below one and relative above."""
    if expected.dtype.kind in "OSUb":
        return np.where(expected == actual, 0.0, np.inf)
    one, other = expected.astype("float64"), actual.astype("float64")
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        amounts = np.abs(one - other) / np.maximum(1.0, np.abs(one))
    return np.where(same, 0.0, np.where(np.isfinite(amounts), amounts, np.inf))


def _is_finite(values: Any) -> bool:
    array = np.asarray(values)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
