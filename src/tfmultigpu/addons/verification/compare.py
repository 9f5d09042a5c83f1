"""Comparison of what one device and the replicas computed, within the bounds of rounding.

The bound, relative to the largest number, is 16 * eps(compute dtype) * sqrt(layers), for kernels
see other numbers of rows and their rounding walks at random over the layers, and 4 * eps(float32) *
sqrt(additions), for rows are added in another order. Some networks amplify rounding further, so
what exceeds the bound is measured before anybody is warned: one device computes it again from
weights that are moved by one rounding. A difference counts if it is more than 16 times what that
changes; in half precision, where a rounding is large and kernels add in float32, 4 times.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.one_device import OneDevice, contents_of_tables

_TINY = float(np.finfo("float32").tiny)
_EPSILON = 2.0**-23  # Of float32, the narrowest dtype of a sum.
_NAMES = {"loss": "the loss", "gradient_norm": "the norm of the gradient"}


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of a step with one device on the same global batch.

    Attributes:
        outcome: ``"same"``, ``"different"``, or ``"not verified"``.
        reason: Why it was not verified; empty otherwise.
        differences: What differs, with both numbers; a warning has the first.
        culprit: The first layer, loss or state that depends on how the batch was cut; empty if it
            was not found.
        advice: The line to write instead.
    """

    outcome: Literal["same", "different", "not verified"]
    reason: str = ""
    differences: tuple[str, ...] = ()
    culprit: str = ""
    advice: str = ""

    def __str__(self) -> str:
        """Returns the outcome in a sentence or two."""
        if self.outcome != "different":
            return f"{self.outcome.capitalize()} on one device. {self.reason}".strip()
        what = self.differences[0] if self.differences else "another worker found a difference"
        cause = f" The first that depends on the cut is {self.culprit}." if self.culprit else ""
        return f"The result depends on how the batch was cut: {what}.{cause} {self.advice}"

    __repr__ = __str__  # A notebook shows the text.


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity of one device and of the replicas."""

    key: str  # In what one device computes, such as "loss" or "state 2".
    name: str
    expected: Any
    actuals: Sequence[Any]  # As each replica has it.
    bound: float  # The relative difference that is rounding,
    slack: float = 0.0  # and the absolute one.

    @functools.cached_property
    def apart(self) -> tuple[float, float, float] | None:
        """Both numbers where they lie furthest apart, and how far; None within the bounds."""
        found = [furthest(self.expected, actual, self.bound) for actual in self.actuals]
        return next((each for each in found if each and each[2] > self.slack), None)

    def __str__(self) -> str:
        """Returns its name and both numbers, with as many digits as tell them apart."""
        assert self.apart is not None
        for digits in (4, 6, 9, 17):
            expected, actual = (f"{number:.{digits}g}" for number in self.apart[:2])
            if expected != actual:
                break
        return f"{self.name} is {expected} on one device and {actual} as computed"

    def is_steady(self, still: Mapping[str, Any], again: Mapping[str, Any]) -> bool:
        """Returns whether two runs on one device agree on it."""
        return furthest(still[self.key], again[self.key], self.bound) is None

    def is_beyond(self, still: Mapping[str, Any], moved: Sequence[Any], margin: float) -> bool:
        """Returns whether it lies further apart than so many times what moved weights change."""
        assert self.apart is not None
        base, *changed = (np.asarray(each[self.key], "float64") for each in (still, *moved))
        # Not `distance > ...`: what is not finite is beyond any rounding.
        return not self.apart[2] <= margin * max(_size(each - base) for each in changed)


class Rounding:
    """The rounding of a forward pass: of its least exact layer, a relative bound, and a margin."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Finds the rounding of all layers of a model."""
        dtypes = {tf.as_dtype(layer.compute_dtype) for layer in layers if layer.compute_dtype}
        self.compute = max([_epsilon(d) for d in dtypes if d.is_floating], default=_EPSILON)
        tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        if tf32 and tf.config.list_logical_devices("GPU"):
            self.compute = max(self.compute, 2.0**-10)
        # That would bound nothing in half precision, whose rounding is measured where it matters.
        half = self.compute > 1e-5
        self.bound = self.compute * (1.0 if half else 16.0 * math.sqrt(len(layers)))
        self.margin = 4.0 if half else 16.0

    def of_sum(self, additions: float = 1.0) -> float:
        """Returns the relative bound for a sum of so many numbers."""
        return self.bound + 4.0 * _EPSILON * math.sqrt(max(additions, 1.0))


def _epsilon(dtype: Any) -> float:
    # NumPy does not know bfloat16.
    return 2.0**-7 if dtype == tf.bfloat16 else float(np.finfo(dtype.as_numpy_dtype).eps)


def furthest(expected: Any, actual: Any, bound: float) -> tuple[float, float, float] | None:
    """Returns both numbers where arrays lie furthest apart, and how far; of other shapes the sizes.

    None within the bound, relative to the largest of the first; integers and NaN must be equal.
    """
    expected, actual = np.atleast_1d(expected), np.atleast_1d(actual)
    if expected.shape != actual.shape:
        return float(expected.size), float(actual.size), math.inf
    exact = expected.dtype.kind not in "fc" and expected.dtype.name != "bfloat16"
    expected, actual = expected.astype("float64"), actual.astype("float64")
    with np.errstate(invalid="ignore"):
        apart = np.abs(expected - actual)
    apart[(expected == actual) | (np.isnan(expected) & np.isnan(actual))] = 0.0
    apart[np.isnan(apart)] = np.inf
    allowed = 0.0 if exact else bound * max(_size(expected[np.isfinite(expected)]), _TINY)
    if not apart.size or apart.max() <= allowed:
        return None
    where = np.unravel_index(np.argmax(apart), apart.shape)
    return float(expected[where]), float(actual[where]), float(apart[where])


def compared(device: OneDevice, expected: Any, logs: Any, bounds: Rounding) -> Iterator[Quantity]:
    """Yields what one device computed, with the same of the replicas, before it is put back."""
    numbers = {name: value.numpy() for name, value in device.named(logs).items()}
    local = device.strategy.experimental_local_results
    # Half precision overflows in a sum of more rows sooner: loss scaling skips such a step.
    norms = [each.get("gradient_norm", 0.0) for each in (numbers, expected)]
    if numbers.get("loss_scale", 1.0) != 1.0 and not np.isfinite(norms).all():
        del numbers["gradient_norm"], numbers["skipped"]
    for name, number in numbers.items():
        bound = bounds.of_sum(numbers.get("weight", 1.0)) * (4.0 if "norm" in name else 1.0)
        # Rows that cancel leave the rounding of a mean of one.
        yield Quantity(
            name, _NAMES.get(name, repr(name)), expected[name], [number], bound, _EPSILON
        )
    paths = _paths_in_metrics(device.step)
    for i, variable in enumerate(device.states):
        # As it is read beside the replicas, then each copy.
        copies = [tf.convert_to_tensor(variable.value)]
        if variable.synchronization != "on_read":
            copies += local(variable.value)
        values = [copy.numpy() for copy in copies]
        # The update has changed a trained weight since, so its copies are compared alone.
        whole = values[0] if variable.trainable else expected[f"state {i}"]
        name = f"the state {paths.get(id(variable), variable.path)!r}"
        yield Quantity(f"state {i}", name, whole, values, bounds.of_sum())
    for i, own in enumerate(device.own):
        name, value = f"the tf.Variable {own.name!r}", own.numpy()
        yield Quantity(f"own {i}", name, expected[f"own {i}"], [value], bounds.of_sum())
    for key, content in contents_of_tables(device.step).items():
        _, number, part = key.split()
        table = device.step.runner.touched.tables[int(number)]
        name = f"a {part} in the table of {table.operation!r}"
        yield Quantity(key, name, expected[key], [content], bounds.of_sum())
    updated = device.updated if "gradient_norm" in numbers else []
    every = [[device.measure(copy).numpy() for copy in local(v.value)] for v in updated]
    # A gradient that cancels to nothing is as exact as the numbers that cancel.
    slack = bounds.bound * 1e-3 * max((_size(c[0]) for c in every[: device.smooth]), default=0.0)
    for i, (variable, copies) in enumerate(zip(updated, every, strict=True)):
        key, name = f"update {i}", f"{variable.path!r} after the update"
        whole = expected[key] if i < device.smooth else copies[0]
        yield Quantity(key, name, whole, copies, 4.0 * bounds.of_sum(), slack)


def _paths_in_metrics(step: Any) -> dict[int, str]:
    """Returns paths of the variables of metrics, by their ``id``, with the names users gave.

    Keras makes a metric of a function, and names its variables before it names the metric.
    """
    paths = {}
    for metric in getattr(step, "metrics", ()):
        for variable in metric.variables:
            paths[id(variable)] = f"{metric.name}/{variable.path.rpartition('/')[2]}"
    return paths


def _size(array: Any) -> float:
    """Returns the largest absolute number."""
    return float(np.max(np.abs(np.asarray(array, "float64")), initial=0.0))
