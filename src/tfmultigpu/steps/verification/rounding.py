"""Bounds on the difference of two computations by rounding alone.

The bound of a comparison is, relative to the larger number,

    16 * eps(compute dtype) * sqrt(layers) + 4 * eps(sum dtype) * sqrt(additions)

with 1 in place of 16 * sqrt(layers) in half precision. The first part is the rounding of a forward
pass whose kernels see other numbers of rows, which adds up like a random walk over the layers. The
second is that of adding the rows in another order. Some networks amplify rounding further, so what
exceeds the bound is measured before anybody is warned: one device computes the quantity again from
weights that are moved by one rounding, and a difference counts only if it is more than 16 times
what that changes; in half precision, where a rounding is large and kernels add in float32, 4 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Rounding", "epsilon", "largest_difference"]


def epsilon(dtype: Any) -> float:
    """Returns the relative rounding of a floating-point dtype."""
    if tf.as_dtype(dtype) == tf.bfloat16:
        return 2.0**-7
    numbers: Any = tf.as_dtype(dtype).as_numpy_dtype
    return float(np.finfo(numbers).eps)


class Rounding:
    """The rounding of a model's forward pass.

    Attributes:
        compute: Relative rounding of the least exact layer.
        bound: Relative bound of a comparison, without the part of the additions.
        margin: How many times the change by one rounding of the weights is rounding.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """Takes all layers of the model."""
        dtypes = {str(layer.compute_dtype) for layer in layers if _is_float(layer.compute_dtype)}
        self.compute = max([epsilon(dtype) for dtype in dtypes], default=epsilon(tf.float32))
        if _uses_tensor_float_32():
            self.compute = max(self.compute, 2.0**-10)
        # That would bound nothing in half precision, whose rounding is measured where it matters.
        half = self.compute > 1e-5
        self.bound = self.compute * (1.0 if half else 16.0 * math.sqrt(len(layers)))
        self.margin = 4.0 if half else 16.0

    def of_sum(self, dtype: Any, additions: float) -> float:
        """Returns the relative bound for a sum.

        Args:
            dtype: What it is summed in.
            additions: How many numbers are added.
        """
        return self.bound + 4.0 * epsilon(dtype) * math.sqrt(max(additions, 1.0))


def largest_difference(one: Any, other: Any, bound: float) -> tuple[float, float, float] | None:
    """Returns where two arrays lie furthest apart, relative to the largest number in them.

    Args:
        one: What one device computed.
        other: What the replicas computed, of the same shape.
        bound: Relative difference that is rounding; integers must be equal.

    Returns:
        Both numbers and their distance; None if all are within the bound. NaN equals NaN.
    """
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    if one.dtype.kind not in "fc" and one.dtype.name != "bfloat16":
        unequal = np.flatnonzero(np.ravel(one != other))
        if not unequal.size:
            return None
        a, b = (np.ravel(array)[unequal[0]] for array in (one, other))
        return float(a), float(b), abs(float(a) - float(b))
    one, other = one.astype("float64"), other.astype("float64")
    with np.errstate(invalid="ignore"):
        apart = np.abs(one - other)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    apart[np.isnan(apart)] = np.inf
    if not apart.size:
        return None
    finite = np.abs(one[np.isfinite(one)])
    allowed = bound * max(finite.max(initial=0.0), np.finfo("float32").tiny)
    where = np.unravel_index(np.argmax(apart), apart.shape)
    if apart[where] <= allowed:
        return None
    return float(one[where]), float(other[where]), float(apart[where])


def _is_float(dtype: Any) -> bool:
    return dtype is not None and tf.as_dtype(dtype).is_floating


def _uses_tensor_float_32() -> bool:
    accelerated = bool(tf.config.list_logical_devices("GPU"))
    return accelerated and tf.config.experimental.tensor_float_32_execution_enabled()
