"""Conversion of user data to a ``tf.data.Dataset`` of global batches, or of single examples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import any_rows, count_rows, tensors_of
from tfmultigpu.errors import DataError


def to_dataset(data: Any, batch_size: int | None = None) -> tf.data.Dataset[Any]:
    """Returns data as a dataset of global batches, which can be iterated any number of times."""
    check_not_distributed(data)
    if isinstance(data, (Iterator, tf.data.Iterator)):
        raise DataError(
            "An iterator can be read once, and inspecting it would lose batches. Received: "
            f"{type(data).__name__}. Give its function, make_batches, not make_batches()."
        )
    passes: Any = data
    if not (isinstance(data, tf.data.Dataset) or callable(data)):
        passes = None if is_arrays(data) else _compat.passes_of_keras(data)
    if passes is None:
        arrays = tensors_of_arrays(data)
        if batch_size is None:
            raise DataError(
                "Arrays need the size of a global batch. Received: batch_size=None. Write "
                "tmg.distribute_dataset((x, y), strategy, batch_size=64)."
            )
        batch_size = check_count("batch_size", batch_size, error=DataError)
        return untuned(tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size))
    if batch_size is not None:
        raise DataError(
            f"batch_size is for arrays, and a {type(data).__name__} yields batches by itself. "
            f"Received: batch_size={batch_size}. Leave batch_size out of this call. If the data "
            f"has single examples, add .batch({batch_size}) in the line that makes the dataset."
        )
    if isinstance(data, tf.data.Dataset):
        return data
    made = _Passes(passes)
    return untuned(tf.data.Dataset.from_generator(made, output_signature=made.spec))


def untuned(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Turns tuning off: who drops an iterator waits for the tuner's thread, up to a minute."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def to_examples(source: Any) -> tf.data.Dataset[Any]:
    """Returns data as a dataset of single examples."""
    check_not_distributed(source)
    if isinstance(source, tf.data.Dataset):
        return source
    if not is_arrays(source):
        raise DataError(
            "preprocess takes single examples: a tf.data.Dataset of them, or arrays. Received: "
            f"{type(source).__name__}. Of an object with source[i] give the numbers, "
            "np.arange(len(source)), and read in preprocess: tf.numpy_function(lambda i: "
            "source[i], [number], dtype)."
        )
    return tf.data.Dataset.from_tensor_slices(tensors_of_arrays(source))


def check_not_distributed(data: Any) -> None:
    """Checks that data is not distributed already."""
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedValues)):
        raise DataError(
            f"The data is already distributed. Received: {type(data).__name__}. Give the original "
            "data, from which global batches are formed."
        )


def is_arrays(data: Any) -> bool:
    """Returns whether data is arrays or numbers, in any structure, which need a batch size."""
    kinds = (bool, int, float, str, tf.RaggedTensor, tf.SparseTensor)
    return all(
        leaf is None or hasattr(leaf, "__array__") or isinstance(leaf, kinds)
        for leaf in tf.nest.flatten(data)
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
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if not leaves or () in shapes or len({int(count_rows(leaf)) for leaf in leaves}) > 1:
        raise DataError(
            "Arrays are paired by rows, so each needs one row per example. Received: shapes "
            f"{shapes}."
        )
    return arrays


def _array_to_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{type(value).__name__} is not an array")
    with tf.device("CPU:0"):  # Where tf.data reads it: all data need not fit into a GPU.
        return tf.convert_to_tensor(value)


def _lists_to_tuples(batch: Any) -> Any:
    """Converts lists of arrays to tuples and other lists to arrays; tf.data would stack both."""
    if isinstance(batch, list) and not any(map(_holds_arrays, batch)):
        return np.asarray(batch)
    if isinstance(batch, Mapping):
        return {name: _lists_to_tuples(item) for name, item in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    items = map(_lists_to_tuples, batch)
    return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)


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
        seen = [_to_tensors_or_arrays(batch) for batch in itertools.islice(self._first, 2)]
        if not seen:
            raise DataError(
                f"The data yields no batches. Received: {getattr(make_batches, '__name__', '')!r}."
            )
        first, second = (tf.nest.map_structure(_spec_of, seen[i]) for i in (0, -1))
        self.spec = tf.nest.map_structure(
            lambda spec, other: spec.most_specific_common_supertype([other]) or spec, first, second
        )
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
        return map(self._checked, batches)

    def _checked(self, batch: Any) -> Any:
        """Returns a batch; TensorFlow would convert one of another type, and drop fractions."""
        batch = _to_tensors_or_arrays(batch)
        for spec, leaf in zip(tf.nest.flatten(self.spec), tf.nest.flatten(batch), strict=False):
            if getattr(spec, "dtype", None) != getattr(leaf, "dtype", None):
                raise DataError(
                    "The batches of the generator differ in their types. Received: "
                    f"{leaf!r}, after {spec}."
                )
        return batch


def _to_tensors_or_arrays(batch: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else np.asarray(leaf),
        _lists_to_tuples(batch),
    )


def _spec_of(leaf: Any) -> Any:
    spec = tf.type_spec_from_value(leaf)
    return spec if leaf is None else any_rows(spec)
