"""How two trainings are compared, and how the difference is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Difference", "Differences", "InvarianceReport", "ReplicaInvarianceError", "compare"]

_SHOWN = 8


class ReplicaInvarianceError(AssertionError):
    """Training on several replicas did not give what one device gives."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity.

    Attributes:
        quantity: What differs, such as ``"loss"`` or ``"Sequential: dense/kernel"``.
        step: The step after which it was largest, counted from 1; 0 is before training.
        amount: By how much: absolute below one, relative above. NaN and infinity on one side only,
            and arrays of different shapes, differ by infinity.
        place: Where in the array.
        expected: The value on one device there.
        actual: The value on the replicas there.
    """

    quantity: str
    step: int
    amount: float
    place: tuple[int, ...] = ()
    expected: Any = None
    actual: Any = None

    def __str__(self) -> str:
        """One line, for a person."""
        where = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        return (
            f"{self.quantity}{where}: {self.actual!s} instead of {self.expected!s}, "
            f"off by {self.amount:.1e}"
        )


@dataclasses.dataclass(frozen=True)
class InvarianceReport:
    """How far training on replicas was from one device; prints as a table.

    Attributes:
        where: What it ran on.
        steps: How many optimizer steps were compared.
        tolerance: What was allowed.
        differences: For each quantity its largest difference.
        first: What differed by more than allowed after the first step where anything did.
        not_finite: What was infinite or NaN on one device, where equality says little.
    """

    where: str
    steps: int
    tolerance: float
    differences: Mapping[str, Difference]
    first: tuple[Difference, ...] = ()
    not_finite: tuple[str, ...] = ()

    @property
    def largest(self) -> Difference | None:
        """The largest difference of all, None where nothing was compared."""
        return max(self.differences.values(), key=lambda one: one.amount, default=None)

    def __str__(self) -> str:
        """All quantities, the largest difference first; what differed first above them."""
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
        apart = [one for one in ordered if one.amount > 0]
        lines.append(f"Equal to the bit: {len(ordered) - len(apart)} of {len(ordered)} quantities.")
        if apart:
            lines.append("Largest differences:")
        lines += [
            f"  {one.amount:8.1e}  step {one.step:3}  {one.quantity}" for one in apart[:_SHOWN]
        ]
        if len(apart) > _SHOWN:
            lines.append(f"  and {len(apart) - _SHOWN} smaller ones")
        return "\n".join(lines)


class Differences:
    """Keeps the largest difference of each quantity, and which were too large first."""

    def __init__(self, tolerance: float, tolerances: Mapping[str, float]) -> None:
        """Takes what is allowed, and what for quantities with a text in their name."""
        self.largest: dict[str, Difference] = {}
        self.first: list[Difference] = []
        self.not_finite: dict[str, None] = {}
        self.tolerance = tolerance
        self._tolerances = tolerances

    def add(self, quantity: str, step: int, expected: Any, actual: Any) -> None:
        """Compares one quantity after a step."""
        found = compare(quantity, step, expected, actual)
        if not _is_finite(expected):
            self.not_finite[quantity] = None
        known = self.largest.get(quantity)
        if known is None or found.amount > known.amount:
            self.largest[quantity] = found
        allowed = [limit for text, limit in self._tolerances.items() if text in quantity]
        too_large = found.amount > max(allowed, default=self.tolerance)
        if too_large and (not self.first or self.first[0].step == step):
            self.first.append(found)


def compare(quantity: str, step: int, expected: Any, actual: Any) -> Difference:
    """Returns the largest difference between two arrays of numbers, strings or booleans."""
    one, other = np.asarray(expected), np.asarray(actual)
    if one.shape != other.shape:
        return Difference(quantity, step, np.inf, (), f"shape {one.shape}", f"shape {other.shape}")
    if not one.size:
        return Difference(quantity, step, 0.0)
    apart = _apart(one, other)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
    return Difference(quantity, step, float(apart[place]), place, one[place], other[place])


def _apart(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> Any:
    """Element by element; absolute below one, relative above."""
    if expected.dtype.kind in "OSUb":
        return np.where(expected == actual, 0.0, np.inf)
    one, other = expected.astype("float64"), actual.astype("float64")
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(one - other) / np.maximum(1.0, np.abs(one))
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def _is_finite(values: Any) -> bool:
    array = np.asarray(values)
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
