"""A function ``train(strategy)``, whatever it does inside, run on one device and on replicas.

    for each strategy, one device first:
        set the seeds; values = train(strategy)
    compare the values, by name

Nothing is known of the training but what it returns: so a loop by hand, or another library, can be
compared with one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfmultigpu.addons.testing.differences import Difference, difference, differs, tell
from tfmultigpu.arguments import check_callable
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.compare import values_of
from tfmultigpu.strategies import create_strategy
from tfmultigpu.types import Nested

# By name, the array; of a variable with a copy on each replica, all copies.
Values: TypeAlias = dict[str, list[np.ndarray]]
Train: TypeAlias = Callable[[tf.distribute.Strategy], Nested]

_TWICE = (
    "train returns something else each time, on one device too: it draws without a seed, or keeps "
    "state from one call to the next. Create model, optimizer and data inside it, with seeds. The "
    "second time on one device:"
)
_TRAIN = (
    "def train(strategy), which makes its own data and returns model.get_weights(); or give the "
    "dataset: assert_replica_invariant(build, batches)."
)
_RETURN = "Return arrays, such as model.get_weights(), alone or in dicts and lists."


def hold(
    train: Train,
    strategies: Iterable[tf.distribute.Strategy],
    allowed: Callable[[str], float],
) -> Difference:
    """Returns the largest difference between one device and these strategies; raises if too large.

    Args:
        train: A function that takes a strategy.
        strategies: Those to compare with one device.
        allowed: The largest difference by the name of an array.
    """
    check_callable("train", train, "strategy", write=_TRAIN, error=TfMultiGpuError)
    one_device = create_strategy(prefer="one_device", fallback=False)
    expected = run(train, one_device)
    check_finite(expected)
    largest = Difference("nothing", 0, 0.0)
    for strategy in strategies:
        differences = compare(expected, run(train, strategy))
        wrong = above(allowed, differences)
        if wrong:
            # Before the replicas are accused: the same function once more on one device.
            again = above(allowed, compare(expected, run(train, one_device)))
            raise tell(_TWICE, again) if again else tell(differs(strategy), wrong)
        largest = max([largest, *differences], key=lambda found: found.amount)
    return largest


def above(allowed: Callable[[str], float], differences: list[Difference]) -> list[Difference]:
    """Returns the differences that are not allowed."""
    return [found for found in differences if found.amount > allowed(found.quantity)]


def run(train: Train, strategy: tf.distribute.Strategy) -> Values:
    """Returns what a function returns under a strategy, by name, with the seeds set."""
    keras.utils.set_random_seed(0)
    values = dict(_named(train(strategy), "result", strategy))
    if not values:
        raise TfMultiGpuError("train returned nothing to compare.", "no array", _RETURN)
    return values


def check_finite(expected: Values) -> None:
    """Raises if an array of one device has not one number, so that comparing it says nothing."""
    for name, (array, *_) in expected.items():
        if array.size and array.dtype.kind in "fc" and not np.isfinite(array).any():
            raise TfMultiGpuError(
                "One device has no finite number to compare with.",
                f"{name} of {array.ravel()[0]}",
                "Train so that one device does not diverge: a smaller learning rate, fewer steps; "
                "or leave that array out.",
            )


def compare(expected: Values, actual: Values) -> list[Difference]:
    """Returns the difference of each array, the largest of the copies of a variable.

    Names that differ in the numbers of Keras' layers alone (``dense``, ``dense_1``) are paired in
    order: Keras counts layers across the process.
    """
    if expected.keys() == actual.keys():
        pairs = list(zip(expected, expected, strict=True))
    else:
        pairs = list(zip(expected, actual, strict=False))
        if _without_numbers(expected) != _without_numbers(actual):
            missing = [name for name in expected if name not in actual]
            added = [name for name in actual if name not in expected]
            named = f"{missing[:4]} on one device alone, {added[:4]} on replicas alone"
            raise tell(f"train returned other names on replicas: {named}.", [])
    differences = []
    for name, other in pairs:
        copies = [_compare_arrays(expected[name][0], copy, name) for copy in actual[other]]
        differences.append(max(copies, key=lambda found: found.amount))
    return differences


def _compare_arrays(expected: np.ndarray, actual: np.ndarray, name: str) -> Difference:
    if expected.shape == actual.shape and expected.dtype != actual.dtype:
        kinds = f"dtype {expected.dtype}", f"dtype {actual.dtype}"
        return Difference(name, 0, np.inf, (), *kinds)
    return difference(expected, actual, name)


def _without_numbers(names: Iterable[str]) -> list[str]:
    return [re.sub(r"_\d+", "", name) for name in names]


def _named(
    value: Nested, name: str, strategy: tf.distribute.Strategy
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields each array of a nested structure, named as one would write it."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, f"{name}[{key!r}]", strategy)
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from _named(part, f"{name}[{place}]", strategy)
    elif isinstance(value, keras.Variable | tf.Variable):
        path = getattr(value, "path", value.name)
        yield f"{name} ({path})", values_of(strategy, value)
    elif isinstance(value, tf.distribute.DistributedValues):
        raise TfMultiGpuError(
            "strategy.run returns a value for each replica, and one device has one.",
            f"{name} of {type(value).__name__}",
            'Return what is computed of all of them: strategy.reduce("SUM", value, axis=None), or '
            "for rows strategy.gather(value, axis=0).",
        )
    elif isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        for place, part in enumerate(tf.nest.flatten(value, expand_composites=True)):
            yield f"{name}, component {place}", [part.numpy()]
    elif value is not None:
        yield name, [_array(value, name)]


def _array(value: Any, name: str) -> np.ndarray:
    try:
        if tf.is_tensor(value):
            value = tf.convert_to_tensor(value)
        array = np.asarray(value)
    except (TypeError, ValueError):
        array = np.asarray(None)
    # An array of objects, or a function or a model that NumPy wraps into one.
    if array.dtype.kind == "O" and not all(isinstance(v, str | bytes) for v in array.ravel()):
        raise TfMultiGpuError(
            "train returned what cannot be compared.", f"{name} of {type(value).__name__}", _RETURN
        )
    return array
