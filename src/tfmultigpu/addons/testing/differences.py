"""What differs between a training on one device and one on replicas, for a person."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfmultigpu.steps.compare import furthest
from tfmultigpu.types import Scalar

_SHOWN = 8  # Differences in an error.


class ReplicaInvarianceError(AssertionError):
    """Training on several replicas differs from training on one device."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity.

    Attributes:
        quantity: The name of the quantity, such as ``"loss"`` or ``"Sequential: dense/kernel"``.
        step: The step after which the difference was largest, from 1 on; 0 is before training, and
            for a function of your own.
        amount: The size: absolute below one, relative above; infinity if the shapes differ.
        place: The index in the array.
        expected: The value on one device.
        actual: The value on the replicas.
    """

    quantity: str
    step: int
    amount: float
    place: tuple[int, ...] = ()
    expected: Scalar = None
    actual: Scalar = None

    def __str__(self) -> str:
        """Formats the difference as one line."""
        if self.expected is None:  # There are no numbers, or all are equal.
            return "no difference"
        index = f"{list(self.place)}" if self.place else ""
        values = f"{self.actual!s} instead of {self.expected!s}"
        return f"{self.quantity}{index}: {values}, off by {self.amount:.1e}{self._relative()}"

    def _relative(self) -> str:
        # Where the two sizes are not one: below one, the amount is absolute.
        if not np.isfinite(self.amount) or not 0 < abs(self.expected) < 1:
            return ""
        return f" (relative {self.amount / abs(self.expected):.1e})"


def difference(expected: object, actual: object, quantity: str = "", step: int = 0) -> Difference:
    """Returns the largest difference between two arrays of numbers, texts or booleans."""
    return Difference(quantity, step, *furthest(expected, actual, relative=True))


def differs(strategy: tf.distribute.Strategy) -> str:
    """Returns the first line of a message about a strategy."""
    return (
        f"Training on replicas differs from one device: {type(strategy).__name__} with "
        f"{strategy.num_replicas_in_sync} replica(s)."
    )


def tell(title: str, differences: list[Difference]) -> ReplicaInvarianceError:
    """Returns the error that lists the first differences below a title."""
    lines = [title, *(f"  {found}" for found in differences[:_SHOWN])]
    if len(differences) > _SHOWN:
        lines.append(f"  and {len(differences) - _SHOWN} more")
    return ReplicaInvarianceError("\n".join(lines))
