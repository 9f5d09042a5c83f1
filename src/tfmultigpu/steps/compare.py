"""Comparison of arrays of one device and of replicas: where they lie furthest apart.

Those who ask say how far is too far: verification bounds rounding, a test has tolerances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfmultigpu.strategies.topology import is_on_read, tf_variable
from tfmultigpu.types import Array, KerasVariable, Scalar


class Furthest(NamedTuple):
    """The elements of two arrays that lie furthest apart; of arrays of other shapes the shapes."""

    distance: float  # Infinity if one is not finite, or if texts or shapes differ.
    place: tuple[int, ...] = ()
    expected: Scalar = None
    actual: Scalar = None


def furthest(expected: object, actual: object, *, relative: bool = False) -> Furthest:
    """Returns where two arrays of numbers or texts lie furthest apart; NaN is equal to NaN.

    A ``relative`` distance is divided by the absolute value that is expected, if that is above one.
    """
    expected, actual = np.asarray(expected), np.asarray(actual)
    if expected.shape != actual.shape:
        return Furthest(math.inf, (), f"shape {expected.shape}", f"shape {actual.shape}")
    if not expected.size:
        return Furthest(0.0)
    if expected.dtype.kind in "OSU":
        distances = np.where(expected == actual, 0.0, np.inf)
    else:
        before, after = wide(expected), wide(actual)
        unit = np.maximum(1.0, np.abs(before)) if relative else 1.0
        with np.errstate(invalid="ignore", over="ignore"):
            distances = np.abs(before - after) / unit
        is_same = (before == after) | (np.isnan(before) & np.isnan(after))
        distances = np.where(is_same, 0.0, np.where(np.isfinite(distances), distances, np.inf))
    place = tuple(map(int, np.unravel_index(int(np.argmax(distances)), distances.shape)))
    return Furthest(float(distances[place]), place, expected[place], actual[place])


def wide(numbers: object) -> Array:
    """Returns numbers in float64 or complex128."""
    array = np.asarray(numbers)
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


def values_of(strategy: tf.distribute.Strategy, variable: KerasVariable) -> list[Array]:
    """Returns the value of a variable on each replica here; the sum if it is added when read."""
    value = tf_variable(variable)
    copies = [value] if is_on_read(variable) else strategy.experimental_local_results(value)
    return [tf.convert_to_tensor(copy).numpy() for copy in copies]
