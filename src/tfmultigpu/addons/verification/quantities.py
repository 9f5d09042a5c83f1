"""The quantities of a step that are compared with one device, each with its bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.verification.one_device import OneDevice, dense
from tfmultigpu.addons.verification.rounding import Quantity, Rounding, epsilon, size

__all__ = ["gradients", "quantities", "terms", "updates"]


def quantities(
    device: OneDevice, one: Any, logs: Any, tallies: Any, rounding: Rounding
) -> Iterator[Quantity]:
    """Yields all that can be compared once the step has run, but gradients and weights.

    Args:
        device: The one device.
        one: What it has computed.
        logs: What the step returned.
        tallies: Its tally.
        rounding: The rounding of the model.
    """
    if not hasattr(device.twin, "trace"):
        for i, output in enumerate(dense(logs)):
            expected = one[f"output {i}"]
            if expected.shape != output.shape:
                lengths = len(expected), [len(output)]
                yield Quantity("length", i, f"the length of output {i}", *lengths)
                continue
            bound = rounding.of_sum(output.dtype)
            yield Quantity(
                "output", i, f"an element of output {i}", expected, [output.numpy()], bound
            )
        return
    tally = tallies[""]
    yield from terms(tally.layout, device.dtype, one["terms"], tally.terms.numpy(), rounding)
    for i, variable in enumerate(device.states):
        first, *copies = _copies(variable, device.strategy)
        if variable.trainable:
            name = f"the trained weight {variable.path!r}, which a layer assigns,"
            yield Quantity("copy", i, name, first, copies, rounding.bound)
        else:
            name, bound = f"the state {variable.path!r}", rounding.of_sum(variable.dtype)
            yield Quantity("state", i, name, one[f"state {i}"], [first, *copies], bound)
    # Half precision overflows in sums of more rows sooner: loss scaling skips such a step.
    norm, scale = (float(value) for value in tally.last) if tally.layout.trains else (0.0, 1.0)
    if "norm 0" in one and (scale == 1.0 or np.isfinite([norm, one["norm 0"]]).all()):
        bound = 4.0 * rounding.of_sum("float32")
        yield Quantity("norm", 0, "the norm of the gradient", one["norm 0"], [norm], bound)


def terms(
    layout: Any, dtype: Any, one: Any, replicas: Any, rounding: Rounding
) -> Iterator[Quantity]:
    """Yields the sums and the weights of the terms of a loss, each loss before what divides it."""
    count = len(layout.own)
    for i, term in enumerate(layout.own):
        weights = float(one[count + i]), float(replicas[count + i])
        rows, name = abs(weights[0]), _name_of(i, term)
        # Rows that cancel leave the rounding of a mean of one.
        bound, slack = rounding.of_sum(dtype, rows), epsilon(dtype) * max(rows, 1.0)
        if not term.fixed:
            exact, pair = bound - rounding.bound, (weights[0], weights[1:])
            yield Quantity("weight", i, f"the weight of {name}", *pair, exact, slack)
        per = weights if all(weights) else (1.0, 1.0)
        yield Quantity("sum", i, name, one[i], [replicas[i]], bound, slack, per)


def gradients(device: OneDevice, one: Any, replicas: Any, rounding: Rounding) -> Iterator[Quantity]:
    """Yields the gradients: one that cancels to nothing is as exact as the numbers that cancel."""
    expected = [one[f"gradient {i}"] for i in range(len(device.variables))]
    slack = rounding.bound * 1e-3 * max(map(size, expected), default=0.0)
    for i, variable in enumerate(device.variables):
        name = f"the gradient of {variable.path!r}"
        yield Quantity("gradient", i, name, expected[i], [replicas[i]], rounding.bound, slack)


def updates(
    device: OneDevice, one: Any, before: Any, after: Any, rounding: Rounding
) -> Iterator[Quantity]:
    """Yields an element of each chosen variable that stands for its update.

    An element of small gradient may move by rounding alone, as far as any other: Adam divides by
    the size of the gradient. So it is the median of those of large gradients.
    """
    for i, old, new in zip(device.chosen, before, after, strict=True):
        variable = device.variables[i]
        gradient = np.abs(np.asarray(one[f"gradient {i}"], "float64"))
        old, new, now = (np.asarray(v, "float64") for v in (old, new, variable.numpy()))
        large = gradient >= 0.1 * gradient.max(initial=0.0)
        apart = np.where(large, np.abs(now - new), np.nan).ravel()
        if not np.isfinite(gradient).all() or not gradient.any():
            continue
        middle = np.argsort(apart)[np.count_nonzero(large) // 2]
        steps = [(value - old).ravel()[middle] for value in (new, now)]
        slack = 8.0 * epsilon(variable.dtype) * size(old)
        name = f"the update of an element of {variable.path!r}"
        bound = max(10.0 * rounding.bound, 1e-3)
        yield Quantity("update", i, name, steps[0], steps[1:], bound, slack)


def _name_of(number: int, term: Any) -> str:
    """Returns the name of a term for a person."""
    if term.name is not None:
        return f"the value {term.name!r}" if term.logged else f"the loss of output {term.name!r}"
    return "the loss" if number == 0 else "an added loss"


def _copies(variable: Any, strategy: tf.distribute.Strategy) -> list[Any]:
    """The value of a variable as it is read beside the replicas, and each copy of it."""
    inner = variable.value
    values = [tf.convert_to_tensor(inner)]
    if getattr(inner, "synchronization", None) != tf.VariableSynchronization.ON_READ:
        values += strategy.experimental_local_results(inner)
    return [value.numpy() for value in values]
