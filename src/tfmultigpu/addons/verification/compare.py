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
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.one_device import Numbers, OneDevice, contents_of_tables
from tfmultigpu.steps.compare import Furthest, furthest, values_of, wide
from tfmultigpu.steps.tally import OF_GRADIENT
from tfmultigpu.strategies.topology import is_on_read
from tfmultigpu.types import Array, KerasLayer

_TINY = float(np.finfo("float32").tiny)
_EPSILON = 2.0**-23  # Of float32, the narrowest dtype of a sum.
_NAMES = {"loss": "the loss", "gradient_norm": "the norm of the gradient"}


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of a step with one device on the same global batch.

    Attributes:
        outcome: ``"same"``, ``"different"``, or ``"not verified"``.
        reason: Why it, or a part of it, was not verified; empty otherwise.
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
        what, cause = "another worker found a difference", ""
        if self.differences:
            what = self.differences[0]
        if self.culprit:
            cause = f" The first that depends on the cut is {self.culprit}."
        return f"The result depends on how the batch was cut: {what}.{cause} {self.advice}"

    __repr__ = __str__  # A notebook shows the text.


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A quantity of one device and of the replicas."""

    key: str  # In what one device computes, such as "loss" or "state 2".
    name: str
    expected: Array
    actuals: Sequence[Array]  # As each replica has it.
    bound: float  # The relative difference that is rounding,
    slack: float = 0.0  # and the absolute one.
    is_metric: bool = False

    @property
    def kind(self) -> str:
        """What it is, such as "loss" or "state"; a state of a metric is a "metric"."""
        if self.is_metric:
            return "metric"
        return self.key.split()[0]

    @functools.cached_property
    def apart(self) -> Furthest | None:
        """Where it lies furthest apart on the first replica beyond the bounds; or None."""
        for actual in self.actuals:
            apart = beyond_bounds(self.expected, actual, self.bound, self.slack)
            if apart is not None:
                return apart
        return None

    def __str__(self) -> str:
        """Returns its name and both numbers, with as many digits as tell them apart."""
        assert self.apart is not None
        expected, actual = self.apart.expected, self.apart.actual
        if not isinstance(expected, str):  # As shapes are.
            numbers = wide([expected, actual])
            for digits in (4, 6, 9, 17):
                expected, actual = (f"{number:.{digits}g}" for number in numbers)
                if expected != actual:
                    break
        return f"{self.name} is {expected} on one device and {actual} as computed"

    def is_steady(self, still: Numbers, again: Numbers) -> bool:
        """Returns whether two runs on one device agree on it."""
        return beyond_bounds(still[self.key], again[self.key], self.bound) is None

    def is_beyond(self, still: Numbers, moved: Sequence[Numbers], margin: float) -> bool:
        """Returns whether it lies further apart than so many times what moved weights change."""
        assert self.apart is not None
        base = wide(still[self.key])
        change = max(_size(wide(each[self.key]) - base) for each in moved)
        # Not `distance > ...`: what is not finite is beyond any rounding.
        return not self.apart.distance <= margin * change


class Rounding:
    """The rounding of a forward pass: of its least exact layer, relative bounds, and a margin.

    Exact, there is no rounding but in the optimizer, which here runs by itself: TensorFlow rewrites
    a graph so that some numbers round otherwise.
    """

    def __init__(self, layers: Sequence[KerasLayer], *, exact: bool = False) -> None:
        dtypes = {tf.as_dtype(layer.compute_dtype) for layer in layers if layer.compute_dtype}
        self.compute = max([_epsilon(d) for d in dtypes if d.is_floating], default=_EPSILON)
        tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        if tf32 and tf.config.list_logical_devices("GPU"):
            self.compute = max(self.compute, 2.0**-10)
        # That would bound nothing in half precision, whose rounding is measured where it matters.
        bound, self.margin = self.compute, 4.0
        if self.compute <= 1e-5:
            bound, self.margin = self.compute * 16.0 * math.sqrt(len(layers)), 16.0
        self.slack, self.of_update = _EPSILON, 4.0 * (bound + 4.0 * _EPSILON)
        if exact:
            bound = self.margin = self.slack = 0.0
        self.bound = bound

    def of_sum(self, additions: float = 1.0) -> float:
        """Returns the relative bound for a sum of so many numbers."""
        return self.bound + 4.0 * self.slack * math.sqrt(max(additions, 1.0))


def _epsilon(dtype: Any) -> float:
    if dtype == tf.bfloat16:  # NumPy does not know it.
        return 2.0**-7
    return float(np.finfo(dtype.as_numpy_dtype).eps)


def beyond_bounds(
    expected: Array, actual: Array, bound: float, slack: float = 0.0
) -> Furthest | None:
    """Returns where arrays lie furthest apart; None within an absolute ``slack``, or a ``bound``.

    The bound is relative to the largest number that is expected; integers must be equal.
    """
    expected = np.asarray(expected)
    allowed = slack
    if expected.dtype.kind in "fc" or expected.dtype.name == "bfloat16":
        largest = _size(expected[np.isfinite(wide(expected))])
        allowed = max(slack, bound * max(largest, _TINY))
    apart = furthest(expected, actual)
    return apart if apart.distance > allowed else None


def compared(
    device: OneDevice, expected: Numbers, logs: Any, bounds: Rounding
) -> Iterator[Quantity]:
    """Yields what one device computed, with the same of the replicas, before it is put back."""
    numbers = {name: value.numpy() for name, value in device.named(logs).items()}
    local = device.strategy.experimental_local_results
    # Half precision overflows in a sum of more rows sooner: loss scaling skips such a step.
    if numbers.get("loss_scale", 1.0) != 1.0:
        norms = [each[name] for each in (numbers, expected) for name in OF_GRADIENT]
        if not np.isfinite(norms).all():
            for name in (*OF_GRADIENT, "skipped"):
                del numbers[name]
    for name, number in numbers.items():
        bound = bounds.of_sum(numbers.get("weight", 1.0))
        if name in OF_GRADIENT:
            bound *= 4.0
        shown = _NAMES.get(name, repr(name))
        # Rows that cancel leave the rounding of a mean of one.
        yield Quantity(name, shown, expected[name], [number], bound, bounds.slack)
    paths = _paths_in_metrics(device.step)
    for i, variable in enumerate(device.states):
        values = values_of(device.strategy, variable)
        whole = expected[f"state {i}"]
        if variable.trainable:  # The update has changed it since: its copies are compared alone.
            whole = values[0]
        name = f"the state {paths.get(id(variable), variable.path)!r}"
        state = f"state {i}", name, whole, values, bounds.of_sum()
        yield Quantity(*state, is_metric=is_on_read(variable))
    for i, own in enumerate(device.own):
        name, value = f"the tf.Variable {own.name!r}", own.numpy()
        yield Quantity(f"own {i}", name, expected[f"own {i}"], [value], bounds.of_sum())
    for key, content in contents_of_tables(device.step).items():
        _, number, part = key.split()
        table = device.step.runner.touched.tables[int(number)]
        name = f"a {part} in the table of {table.operation!r}"
        yield Quantity(key, name, expected[key], [content], bounds.of_sum())
    if OF_GRADIENT.isdisjoint(numbers) or "update 0" not in expected:
        return
    measured: list[list[Array]] = []  # The copies of each variable.
    for variable in device.updated:
        measured.append([np.asarray(device.measure(copy)) for copy in local(variable.value)])
    # A gradient that cancels to nothing is as exact as the numbers that cancel.
    largest = max((_size(copies[0]) for copies in measured[: device.smooth]), default=0.0)
    slack = bounds.of_update * 1e-3 * largest
    for i, (variable, updates) in enumerate(zip(device.updated, measured, strict=True)):
        key, name = f"update {i}", f"{variable.path!r} after the update"
        beside = updates[0]
        if i < device.smooth:
            beside = expected[key]
        yield Quantity(key, name, beside, updates, bounds.of_update, slack)


def _paths_in_metrics(step: Any) -> dict[int, str]:
    """Returns paths of the variables of metrics, by their ``id``, with the names users gave.

    Keras makes a metric of a function, and names its variables before it names the metric.
    """
    paths = {}
    for metric in getattr(step, "metrics", ()):
        for variable in metric.variables:
            paths[id(variable)] = f"{metric.name}/{variable.path.rpartition('/')[2]}"
    return paths


def _size(array: Array) -> float:
    """Returns the largest absolute number."""
    return float(np.max(np.abs(wide(array)), initial=0.0))
