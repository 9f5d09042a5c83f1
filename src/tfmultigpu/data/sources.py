"""Conversion of user data to a ``tf.data.Dataset`` of global batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import any_rows, count_rows, map_items, tensors_of
from tfmultigpu.errors import DataError


def to_dataset(data: Any, batch_size: int | None = None) -> tf.data.Dataset[Any]:
    """Returns data as a dataset of global batches, which can be iterated any number of times."""
    check_not_distributed(data)
    if isinstance(data, (Iterator, tf.data.Iterator)):
        raise DataError(
            "An iterator can be read once, and inspecting it would lose batches. Received: "
            f"{type(data).__name__}. Give the function that makes it: write "
            "tmg.distribute_dataset(make_batches), not tmg.distribute_dataset(make_batches())."
        )
    if tf.nest.is_nested(data) or hasattr(data, "__array__"):
        return _from_arrays(data, batch_size)
    is_dataset = isinstance(data, tf.data.Dataset)
    passes = data if is_dataset or callable(data) else _compat.passes_of_keras(data)
    if passes is None:
        return _from_arrays(data, batch_size)  # Raises.
    if batch_size is not None:
        raise DataError(
            f"batch_size is for arrays, and a {type(data).__name__} already yields batches. "
            f"Received: batch_size={batch_size}. Leave it out, and yield global batches: "
            "dataset.batch(batch_size)."
        )
    return data if is_dataset else _from_passes(_Passes(passes))


def check_not_distributed(data: Any) -> None:
    """Checks that data is not distributed already."""
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedValues)):
        raise DataError(
            f"The data is already distributed. Received: {type(data).__name__}. Give the original "
            "data, from which global batches are formed."
        )


def tensors_of_arrays(data: Any) -> Any:
    """Returns arrays, one or a tuple, list or dict of them, as tensors with equally many rows.

    A list of arrays is ``(x,)``, in which x is a tuple of several inputs, as in Keras.
    """
    if isinstance(data, list) and any(map(_holds_arrays, data)):
        data = (data,)
    try:
        arrays = tf.nest.map_structure(_array_to_tensor, _lists_to_tuples(data))
    except (TypeError, ValueError) as error:
        received = repr(data) if isinstance(data, (str, int, float)) else type(data).__name__
        raise DataError(
            f"The data cannot be distributed: {error}. Received: {received}. Give a "
            "tf.data.Dataset of global batches, arrays with batch_size, or of an iterable of "
            "batches a function that returns it: lambda: it."
        ) from None
    leaves = tensors_of(arrays)
    if not leaves:
        raise DataError(f"The data has no arrays. Received: {data!r}. Give (features, labels).")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if () in shapes or len({int(count_rows(leaf)) for leaf in leaves}) > 1:
        raise DataError(
            "Arrays are paired by rows, so each needs one row per example. Received: shapes "
            f"{shapes}."
        )
    return arrays


def _from_arrays(data: Any, batch_size: int | None) -> tf.data.Dataset[Any]:
    arrays = tensors_of_arrays(data)
    if batch_size is None:
        raise DataError(
            "Arrays need the size of a global batch. Received: batch_size=None. Write "
            "tmg.distribute_dataset((x, y), batch_size=64)."
        )
    batch_size = check_count("batch_size", batch_size, error=DataError)
    leaves = tuple(tensors_of(arrays))
    present = tf.data.Dataset.from_tensor_slices(leaves).batch(batch_size)
    return present.map(functools.partial(fill, arrays))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def fill(structure: Any, *tensors: Any) -> Any:
    """Returns the structure with these tensors as its leaves; a None leaf stays None."""
    replacements = iter(tensors)
    leaves = [None if leaf is None else next(replacements) for leaf in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, leaves)


def _array_to_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{type(value).__name__} is not an array")
    return tf.convert_to_tensor(value)


def _lists_to_tuples(batch: Any) -> Any:
    """Converts lists of arrays to tuples and other lists to arrays; tf.data would stack both."""
    if isinstance(batch, list):
        if not any(map(_holds_arrays, batch)):
            return np.asarray(batch)
        batch = tuple(batch)
    return map_items(_lists_to_tuples, batch) if isinstance(batch, (tuple, Mapping)) else batch


def _holds_arrays(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(map(_holds_arrays, item))
    return isinstance(item, Mapping) or len(getattr(item, "shape", ())) > 0


class _Passes:
    """Fresh iterators of batches; the first pass continues the iterator that was inspected.

    Attributes:
        spec: Type specs of a batch. An axis that differs between the first two batches is unknown.
    """

    def __init__(self, make_batches: Callable[[], Any]) -> None:
        """Reads the first two batches, and keeps them for the first pass."""
        self._make = make_batches
        self._first = iter(make_batches())
        seen = list(itertools.islice(self._first, 2))
        if not seen:
            raise DataError(
                f"The data yields no batches. Received: {getattr(make_batches, '__name__', '')!r}."
            )
        first, second = (
            tf.nest.map_structure(_spec_of, _to_tensors_or_arrays(batch))
            for batch in (seen[0], seen[-1])
        )
        try:
            self.spec = tf.nest.map_structure(_supertype, first, second)
        except (TypeError, ValueError):
            raise DataError(
                "The batches of the generator differ in their structure or types. Received: "
                f"{first}, then {second}."
            ) from None
        self._next_pass: Iterator[Any] | None = itertools.chain(seen, self._first)

    def __call__(self) -> Iterator[Any]:
        """Begins a pass."""
        batches, self._next_pass = self._next_pass, None
        if batches is None:
            batches = iter(self._make())
            if batches is self._first:
                raise DataError(
                    "The function returns the same iterator each time, so the second pass would "
                    "have no data. Make the generator inside the function."
                )
        return (tuple(tensors_of(_to_tensors_or_arrays(batch))) for batch in batches)


def _supertype(first: Any, second: Any) -> Any:
    if first is None and second is None:
        return None
    spec = first.most_specific_common_supertype([second])
    if spec is None:
        raise TypeError(f"{first} and {second} have nothing in common")
    return spec


def _from_passes(passes: _Passes) -> tf.data.Dataset[Any]:
    present = tf.data.Dataset.from_generator(
        passes, output_signature=tuple(tensors_of(passes.spec))
    )
    return present.map(functools.partial(fill, passes.spec))


def _to_tensors_or_arrays(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else np.asarray(leaf),
        _lists_to_tuples(batch),
    )


def _spec_of(leaf: Any) -> Any:
    return None if leaf is None else any_rows(tf.type_spec_from_value(leaf))
