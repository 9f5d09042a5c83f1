"""Comparing what a step computed with what one device computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfmultigpu.steps.verification.one_device import Computed
from tfmultigpu.steps.verification.outcome import Difference
from tfmultigpu.steps.verification.rounding import Rounding, epsilon, largest_difference
from tfmultigpu.steps.verification.trial import dense_outputs

__all__ = [
    "Deviation",
    "beyond_rounding",
    "compare_copies",
    "compare_gradients",
    "compare_outputs",
    "compare_states",
    "compare_terms",
]


@dataclasses.dataclass(frozen=True)
class Deviation:
    """One quantity that lies further apart than rounding explains.

    Attributes:
        kind: What it is of.
        index: The number of the term, the trained variable or the output, or the ``id`` of a state.
        difference: The quantity with both numbers.
        distance: How far they lie apart.
        size: The largest absolute number on one device.
        weight: Whether it is the weight of a term and not its sum.
    """

    kind: Literal["term", "state", "copy", "gradient", "output", "layer"]
    index: int
    difference: Difference
    distance: float
    size: float
    weight: bool = False


def compare_terms(
    terms: Sequence[Any], one: Any, replicas: Any, rounding: Rounding
) -> list[Deviation]:
    """Compares the sums and weights of the terms of a loss.

    Args:
        terms: The terms, of which names and kinds are used.
        one: Their sums, then their weights, on one device.
        replicas: The same, added over the replicas.
        rounding: The rounding of the model.
    """
    one, replicas = np.asarray(one), np.asarray(replicas)
    count = len(terms)
    found = []
    for i, term in enumerate(terms):
        elements = float(np.abs(one[count + i]))
        for place in (count + i, i):
            if place != i and term.fixed:
                continue  # The same on every shard, and not to be added.
            exact = 0.0 if place == i else rounding.bound
            bound = rounding.of_sum(one.dtype, elements) - exact
            apart = largest_difference(one[place : place + 1], replicas[place : place + 1], bound)
            # Rows that cancel leave the rounding of a mean of one.
            if apart is not None and apart[2] > epsilon(one.dtype) * max(elements, 1.0):
                name = _name(i, term) if place == i else f"the weight of {_name(i, term)}"
                means = _means(apart[:2], term, one[count + i], replicas[count + i], place != i)
                difference = Difference(name, *means)
                size = float(np.abs(one[place]))
                found.append(Deviation("term", i, difference, apart[2], size, place != i))
    return found


def compare_states(
    variables: Sequence[Any], computed: Computed, strategy: Any, rounding: Rounding
) -> list[Deviation]:
    """Compares what layers and metrics assigned, on every replica of this process.

    Args:
        variables: The variables that one device assigned to, Keras variables.
        computed: What one device computed.
        strategy: The strategy they live on; over several workers a collective.
        rounding: The rounding of the model.
    """
    found = []
    for variable in variables:
        bound = rounding.of_sum(variable.dtype, 1.0) if _is_float(variable) else 0.0
        for value in _copies(variable, strategy):
            apart = largest_difference(computed.states[id(variable)], value, bound)
            if apart is not None:
                difference = Difference(f"the state {variable.path!r}", *apart[:2])
                size = _size(computed.states[id(variable)])
                found.append(Deviation("state", id(variable), difference, apart[2], size))
                break
    return found


def compare_copies(variables: Sequence[Any], strategy: Any, rounding: Rounding) -> list[Deviation]:
    """Compares the copies of trained variables, which a layer may have assigned on its own replica.

    Args:
        variables: The trained variables that layers assigned to, Keras variables.
        strategy: The strategy they live on.
        rounding: The rounding of the model.
    """
    found = []
    for variable in variables:
        first, *others = [np.asarray(one) for one in _copies(variable, strategy)]
        for other in others:
            apart = largest_difference(first, other, rounding.bound)
            if apart is not None:
                name = f"the trained weight {variable.path!r}, which a layer assigns,"
                difference = Difference(name, *apart[:2])
                found.append(Deviation("copy", id(variable), difference, apart[2], _size(first)))
                break
    return found


def compare_gradients(
    variables: Sequence[Any], computed: Computed, gradients: Sequence[Any], rounding: Rounding
) -> list[Deviation]:
    """Compares the gradients of the trained variables before clipping.

    Args:
        variables: The trained variables.
        computed: What one device computed.
        gradients: What the replicas computed; None for variables without.
        rounding: The rounding of the model.
    """
    found = []
    pairs = list(zip(computed.gradients, gradients, strict=True))
    largest = max([np.max(np.abs(one), initial=0.0) for one, _ in pairs if one is not None] or [0])
    for i, (one, replicas) in enumerate(pairs):
        if one is None and replicas is None:
            continue
        shape = variables[i].shape
        one = np.zeros(shape) if one is None else one
        other = np.zeros(shape) if replicas is None else np.asarray(replicas, "float64")
        apart = largest_difference(one, other, rounding.bound)
        # A gradient that cancels to nothing is as exact as the numbers that cancel.
        if apart is not None and apart[2] > rounding.bound * 1e-3 * largest:
            difference = Difference(f"the gradient of {variables[i].path!r}", *apart[:2])
            found.append(Deviation("gradient", i, difference, apart[2], _size(one)))
    return found


def compare_outputs(computed: Computed, outputs: Any, rounding: Rounding) -> list[Deviation]:
    """Compares predictions row by row.

    Args:
        computed: What one device computed.
        outputs: What the replicas computed, a nested structure of tensors.
        rounding: The rounding of the model.
    """
    found = []
    for i, (one, other) in enumerate(zip(computed.outputs, dense_outputs(outputs), strict=True)):
        other = other.numpy()
        if one.shape != other.shape:
            difference = Difference(f"the length of output {i}", len(one), len(other))
            found.append(Deviation("output", i, difference, np.inf, _size(one)))
            continue
        apart = largest_difference(one, other, rounding.of_sum(one.dtype, 1.0))
        if apart is not None:
            difference = Difference(f"an element of output {i}", *apart[:2])
            found.append(Deviation("output", i, difference, apart[2], _size(one)))
    return found


def beyond_rounding(
    found: Sequence[Deviation], computed: Sequence[Computed], terms: int, margin: float
) -> list[Deviation]:
    """Returns the deviations that are larger than moving the weights by one rounding explains.

    Relative to the size of each quantity: the weights may have changed since it was computed.

    Args:
        found: The deviations.
        computed: See ``OneDevice.compute_with_moved_weights``.
        terms: The number of terms.
        margin: How many times that change is still rounding.
    """

    def quantity(one: Deviation, of: Computed) -> Any:
        if one.kind == "term":
            return of.stats[one.index + terms * one.weight]
        if one.kind == "state":
            return of.states[one.index]
        return of.outputs[one.index] if one.kind == "output" else of.gradients[one.index]

    def change(one: Deviation) -> float:
        still, *moved = (np.asarray(quantity(one, of), "float64") for of in computed)
        largest = max(_size(other - still) for other in moved)
        return largest / max(_size(still), np.finfo("float64").tiny)

    # Not `distance <= ...`: what is not finite is beyond any rounding.
    return [
        one
        for one in found
        if one.kind == "copy" or not one.distance <= margin * change(one) * one.size
    ]


def _size(array: Any) -> float:
    return float(np.max(np.abs(np.asarray(array, "float64")), initial=0.0))


def _copies(variable: Any, strategy: Any) -> list[Any]:
    """The value of a variable as it is read beside the replicas, and each copy of it."""
    inner = variable.value
    values = [tf.convert_to_tensor(inner)]
    if getattr(inner, "synchronization", None) != tf.VariableSynchronization.ON_READ:
        values += strategy.experimental_local_results(inner)
    return [value.numpy() for value in values]


def _name(index: int, term: Any) -> str:
    if term.name is not None:
        return f"the value {term.name!r}" if term.logged else f"the loss of output {term.name!r}"
    return "the loss" if index == 0 else "an added loss"


def _means(
    sums: tuple[float, float], term: Any, one: float, other: float, is_weight: bool
) -> tuple[float, float]:
    """Returns the means that a user knows: the loss, not its sum."""
    if is_weight or term.fixed or not one or not other:
        return sums
    return sums[0] / float(one), sums[1] / float(other)


def _is_float(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)
