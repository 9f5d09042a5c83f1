"""Comparison of what one device and the replicas computed, within the bounds of rounding.

The bound of a comparison is, relative to the largest number,

    16 * eps(compute dtype) * sqrt(layers) + 4 * eps(sum dtype) * sqrt(additions)

with 1 in place of 16 * sqrt(layers) in half precision. The first part is the rounding of a forward
pass whose kernels see other numbers of rows, which adds up like a random walk over the layers. The
second is that of adding the rows in another order. Some networks amplify rounding further, so what
exceeds the bound is measured before anybody is warned: one device computes the quantity again from
weights that are moved by one rounding, and a difference counts only if it is more than 16 times
what that changes; in half precision, where a rounding is large and kernels add in float32, 4 times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.outcome import Difference

__all__ = ["Deviation", "Quantity", "Rounding", "beyond_rounding", "deviations", "size"]

Numbers = Mapping[str, Any]  # What one device computes, by the key of the quantity.


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity that was computed twice.

    Attributes:
        kind: What it is of: ``"sum"``, ``"weight"``, ``"state"``, ``"copy"``, ``"norm"``,
            ``"gradient"``, ``"update"``, ``"output"`` or ``"length"``.
        number: The number of the term, state, variable or output.
        name: Its name, for a person.
        one: What one device computes, an array.
        others: The same as each replica has it.
        bound: The relative difference that is rounding.
        slack: The absolute difference that is rounding.
        per: What a person divides both by: the weight of a loss.
    """

    kind: str
    number: int
    name: str
    one: Any
    others: Sequence[Any]
    bound: float = 0.0
    slack: float = 0.0
    per: tuple[float, float] = (1.0, 1.0)

    @property
    def key(self) -> str:
        """Its key in what one device computes; that of the gradient for an update."""
        return f"{'gradient' if self.kind == 'update' else self.kind} {self.number}"


@dataclasses.dataclass(frozen=True)
class Deviation:
    """A quantity that lies further apart than its bound: both numbers, and how far."""

    quantity: Quantity
    difference: Difference
    distance: float


class Rounding:
    """The rounding of a model's forward pass.

    Attributes:
        compute: Relative rounding of the least exact layer.
        bound: Relative bound of a comparison, without the part of the additions.
        margin: How many times the change by one rounding of the weights is rounding.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """Takes all layers of the model."""
        dtypes = {tf.as_dtype(layer.compute_dtype) for layer in layers if layer.compute_dtype}
        self.compute = max([epsilon(d) for d in dtypes if d.is_floating], default=2.0**-23)
        tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        if tf32 and tf.config.list_logical_devices("GPU"):
            self.compute = max(self.compute, 2.0**-10)
        # That would bound nothing in half precision, whose rounding is measured where it matters.
        half = self.compute > 1e-5
        self.bound = self.compute * (1.0 if half else 16.0 * math.sqrt(len(layers)))
        self.margin = 4.0 if half else 16.0

    def of_sum(self, dtype: Any, additions: float = 1.0) -> float:
        """Returns the relative bound for a sum of so many numbers in a dtype; 0 for integers."""
        if not tf.as_dtype(dtype).is_floating:
            return 0.0
        return self.bound + 4.0 * epsilon(dtype) * math.sqrt(max(additions, 1.0))


def epsilon(dtype: Any) -> float:
    """Returns the relative rounding of a floating-point dtype."""
    if tf.as_dtype(dtype) == tf.bfloat16:
        return 2.0**-7
    numbers: Any = tf.as_dtype(dtype).as_numpy_dtype
    return float(np.finfo(numbers).eps)


def deviations(quantities: Iterable[Quantity]) -> list[Deviation]:
    """Returns those of some quantities that lie further apart than their bounds."""
    found = []
    for quantity in quantities:
        for other in quantity.others:
            apart = furthest(quantity.one, other, quantity.bound)
            if apart is not None and apart[2] > quantity.slack:
                numbers = [value / per for value, per in zip(apart, quantity.per, strict=False)]
                found.append(Deviation(quantity, Difference(quantity.name, *numbers), apart[2]))
                break
    return found


def furthest(one: Any, other: Any, bound: float) -> tuple[float, float, float] | None:
    """Returns where two arrays lie furthest apart, relative to the largest number in them.

    Args:
        one: What one device computed.
        other: What the replicas computed.
        bound: Relative difference that is rounding; integers must be equal.

    Returns:
        Both numbers and their distance, those of lengths if the shapes differ; None if all are
        within the bound. NaN equals NaN.
    """
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    if one.shape != other.shape:
        return float(one.size), float(other.size), math.inf
    exact = one.dtype.kind not in "fc" and one.dtype.name != "bfloat16"
    one, other = one.astype("float64"), other.astype("float64")
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    apart[np.isnan(apart)] = np.inf
    finite = np.abs(one[np.isfinite(one)])
    tiny = float(np.finfo("float32").tiny)
    allowed = 0.0 if exact else bound * max(finite.max(initial=0.0), tiny)
    if not apart.size or apart.max() <= allowed:
        return None
    where = np.unravel_index(np.argmax(apart), apart.shape)
    return float(one[where]), float(other[where]), float(apart[where])


def beyond_rounding(
    found: Sequence[Deviation], still: Numbers, moved: Sequence[Numbers], margin: float
) -> list[Deviation]:
    """Returns the deviations that are larger than moving the weights by one rounding explains.

    Relative to the size of each quantity: the weights may have changed since it was computed.

    Args:
        found: The deviations.
        still: What one device computes with the weights as they are.
        moved: The same with moved weights, several times. Without the key of a quantity nothing
            that is moved explains its deviation.
        margin: How many times that change is still rounding.
    """

    def change(key: str) -> float:
        base = np.asarray(still[key], "float64")
        largest = max(size(np.asarray(each[key], "float64") - base) for each in moved)
        return largest / max(size(base), np.finfo("float64").tiny)

    # Not `distance <= ...`: what is not finite is beyond any rounding.
    return [
        one
        for one in found
        if one.quantity.key not in still
        or not one.distance <= margin * change(one.quantity.key) * size(one.quantity.one)
    ]


def size(array: Any) -> float:
    """Returns the largest absolute number."""
    return float(np.max(np.abs(np.asarray(array, "float64")), initial=0.0))
