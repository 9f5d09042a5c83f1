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
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.outcome import Difference

_TINY = float(np.finfo("float32").tiny)


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity of one device and of the replicas."""

    kind: str  # "term", "state", "copy", "norm", "gradient", "update" or "output"
    number: int  # Of the sum or weight in ``Tally.terms``, of the state, variable or output.
    name: str
    one: Any
    others: Sequence[Any]  # As each replica has it.
    bound: float = 0.0  # The relative difference that is rounding,
    slack: float = 0.0  # and the absolute one.
    per: tuple[float, float] = (1.0, 1.0)  # What a person divides them by: the weight of a loss.

    @property
    def key(self) -> str:
        """Its key in what one device computes; that of the gradient for an update."""
        return f"{'gradient' if self.kind == 'update' else self.kind} {self.number}"

    @functools.cached_property
    def apart(self) -> tuple[float, float, float] | None:
        """Both numbers where they lie furthest apart, and how far; None within the bounds."""
        found = [furthest(self.one, other, self.bound) for other in self.others]
        return next((each for each in found if each and each[2] > self.slack), None)

    @property
    def difference(self) -> Difference:
        """Both numbers as a person knows them."""
        one, other, _ = self.apart or (0.0, 0.0, 0.0)
        return Difference(self.name, one / self.per[0], other / self.per[1])

    def is_steady(self, still: Mapping[str, Any], again: Mapping[str, Any]) -> bool:
        """Returns whether two runs on one device agree on it."""
        key = self.key
        return key not in still or furthest(still[key], again[key], self.bound) is None

    def is_beyond(self, still: Mapping[str, Any], moved: Sequence[Any], margin: float) -> bool:
        """Returns whether it lies further apart than so many times what moved weights change.

        Relative to its size: the weights may have changed since it was computed.
        """
        if self.apart is None or self.key not in still:
            return self.apart is not None
        base, *others = (np.asarray(each[self.key], "float64") for each in (still, *moved))
        change = max(size(other - base) for other in others) / max(size(base), _TINY)
        # Not `distance > ...`: what is not finite is beyond any rounding.
        return not self.apart[2] <= margin * change * size(self.one)


class Rounding:
    """The rounding of a forward pass: of its least exact layer, a relative bound, and a margin."""

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
        """Returns the relative bound for a sum of so many numbers; integers are exact."""
        if not tf.as_dtype(dtype).is_floating:
            return 0.0
        return self.bound + 4.0 * epsilon(dtype) * math.sqrt(max(additions, 1.0))


def epsilon(dtype: Any) -> float:
    """Returns the relative rounding of a floating-point dtype."""
    numbers: Any = tf.as_dtype(dtype).as_numpy_dtype
    return 2.0**-7 if tf.as_dtype(dtype) == tf.bfloat16 else float(np.finfo(numbers).eps)


def furthest(one: Any, other: Any, bound: float) -> tuple[float, float, float] | None:
    """Returns where arrays lie furthest apart: both numbers, and how far; NaN equals NaN.

    None if all are within the bound, relative to the largest of the first; integers must be equal.
    Of other shapes the numbers are the sizes.
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
    allowed = 0.0 if exact else bound * max(size(one[np.isfinite(one)]), _TINY)
    if not apart.size or apart.max() <= allowed:
        return None
    where = np.unravel_index(np.argmax(apart), apart.shape)
    return float(one[where]), float(other[where]), float(apart[where])


def of_terms(layout: Any, dtype: Any, one: Any, other: Any, rounding: Rounding) -> Iterator[Any]:
    """Yields the sums and the weights of the terms of a loss: of vectors that have both."""
    count = len(layout.own)
    for i, term in enumerate(layout.own):
        name = "an added loss" if i else "the loss"
        if term.name is not None:
            name = f"the {'value' if term.logged else 'loss of output'} {term.name!r}"
        weights = float(one[count + i]), float(other[count + i])
        # Rows that cancel leave the rounding of a mean of one.
        rows = max(abs(weights[0]), 1.0)
        bound, slack = rounding.of_sum(dtype, rows), epsilon(dtype) * rows
        if not term.fixed:
            pair, exact = (weights[0], weights[1:]), bound - rounding.bound
            yield Quantity("term", count + i, f"the weight of {name}", *pair, exact, slack)
        per = weights if all(weights) else (1.0, 1.0)
        yield Quantity("term", i, name, one[i], [other[i]], bound, slack, per)


def of_update(i: int, path: str, gradient: Any, values: Any, rounding: Rounding) -> Iterator[Any]:
    """Yields the step of an element that stands for the update of a variable.

    An element of small gradient may move by rounding alone, as far as any other: Adam divides by
    the size of the gradient. So it is the median of those of large gradients.
    """
    before, one, other = (np.ravel(np.asarray(value, "float64")) for value in values)
    sizes = np.ravel(np.abs(np.asarray(gradient, "float64")))
    large = np.flatnonzero(sizes >= 0.1 * sizes.max(initial=_TINY))
    if large.size and np.isfinite(sizes).all():
        place = large[np.argsort(np.abs(other - one)[large])[large.size // 2]]
        steps = [float(value[place] - before[place]) for value in (one, other)]
        bound, slack = max(10.0 * rounding.bound, 1e-3), 8.0 * 2.0**-23 * size(before)
        name = f"the update of an element of {path!r}"
        yield Quantity("update", i, name, steps[0], steps[1:], bound, slack)


def size(array: Any) -> float:
    """Returns the largest absolute number."""
    return float(np.max(np.abs(np.asarray(array, "float64")), initial=0.0))
