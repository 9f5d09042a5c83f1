"""Sources of single examples, which are cheap until they are read or preprocessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import count_rows, tensors_of
from tfmultigpu.data.element_layout import structure_of
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.data.sources import fill, tensors_of_arrays
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.worker_exchange import digest_of

__all__ = ["Examples", "examples_of", "mark_of"]

_SAMPLED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples of a source, by number or one after the other.

    Attributes:
        rows: Their number if each can be read by its number, else None.
        one_by_one: A dataset of examples, if they come one after the other.
        read: From the number of an example, an int64 scalar, to the example; None if the dataset
            yields the examples themselves.
        reads_many: Whether ``read`` takes a vector of numbers too.
    """

    rows: int | None
    one_by_one: tf.data.Dataset[Any] | None
    read: Callable[[Any], Any] | None
    reads_many: bool = False

    def batches(self, batch_size: int) -> tf.data.Dataset[Any]:
        """Returns global batches of examples in order, or of their numbers."""
        if self.one_by_one is not None:
            return self.one_by_one.batch(batch_size)
        assert self.rows is not None
        return tf.data.Dataset.range(self.rows).batch(batch_size)


def examples_of(source: Any) -> Examples:
    """Returns the examples of a source.

    Args:
        source: A ``tf.data.Dataset`` of examples; arrays (one, or a tuple, list or dict of them)
            with a row for each; or an object with ``len(source)`` and ``source[i]``, such as a
            ``PyDataset`` or a Hugging Face ``Dataset``, whose items are examples.

    Raises:
        DataError: It is something else, or empty; or items differ in structure or type.
    """
    if isinstance(source, (tf.distribute.DistributedDataset, tf.distribute.DistributedValues)):
        raise DataError(
            f"The data is already distributed. Received: {type(source).__name__}. Give the source "
            "of single examples."
        )
    if isinstance(source, tf.data.Dataset):
        return Examples(None, source, None)
    if _is_indexable(source):
        return _indexable(source)
    if callable(source):
        raise DataError(
            "preprocess takes single examples: a tf.data.Dataset of them, arrays, or an object "
            f"with len(source) and source[i]. Received: {type(source).__name__}. For a generator, "
            "write tf.data.Dataset.from_generator(f, output_signature=...)."
        )
    arrays = tensors_of_arrays(source)
    rows = int(count_rows(arrays))
    _check_not_empty(source, rows)

    def read(numbers: Any) -> Any:
        return tf.nest.map_structure(
            lambda one: None if one is None else _rows(one, numbers), arrays
        )

    sparse = any(isinstance(one, tf.SparseTensor) for one in tensors_of(arrays))
    return Examples(rows, None, read, reads_many=not sparse)


def mark_of(read: Callable[[Any], Any], rows: int) -> int:
    """Returns a digest of some examples and of their types, by which data is recognised."""
    some = (*range(0, rows, max(rows // _SAMPLED_ROWS, 1)), rows - 1)
    sampled = tf.nest.flatten([read(number) for number in some], expand_composites=True)
    present = [leaf for leaf in sampled if leaf is not None]
    return digest_of(b"".join(tf.io.serialize_tensor(leaf).numpy() for leaf in present))


def _rows(tensor: Any, number: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tf.gather(tensor, number)
    one = slice_rows(tensor, number, number + 1)
    return tf.sparse.reshape(one, tensor.dense_shape[1:])


def _is_indexable(source: Any) -> bool:
    known = (Mapping, list, tuple, str, bytes)
    if isinstance(source, known) or tf.is_tensor(source) or hasattr(source, "__array__"):
        return False
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _indexable(source: Any) -> Examples:
    rows = check_count("len(source)", len(source), 0)
    _check_not_empty(source, rows)
    first, last = (_arrays_of(source[number]) for number in (0, rows - 1))
    try:
        tf.nest.assert_same_structure(first, last)
        specs = list(map(_common, tensors_of(first), tensors_of(last)))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"The first and the last example differ: {error} Received: {type(source).__name__} of "
            f"{rows} examples. Give all of them one structure, dtype and number of axes."
        ) from None

    structure = structure_of(first)

    def item(number: Any) -> list[Any]:
        example = _arrays_of(source[int(number)])
        found = tensors_of(example)
        if structure_of(example) != structure or not all(map(_fits, found, specs)):
            raise DataError(
                f"Example {int(number)} differs from the first. Received: {_described(example)}, "
                f"after {_described(first)}. Give all of them one structure, dtype and number of "
                "axes."
            )
        return found

    def read(number: Any) -> Any:
        tensors = tf.numpy_function(item, [number], [spec.dtype for spec in specs])
        # Called eagerly it returns a single tensor as it is, not in a list.
        tensors = [tensors] if tf.is_tensor(tensors) else tensors
        pairs = zip(tensors, specs, strict=True)
        return fill(first, *[tf.ensure_shape(one, spec.shape) for one, spec in pairs])

    return Examples(rows, None, read)


def _common(first: Any, last: Any) -> Any:
    """Returns the type spec of two arrays; raises a TypeError if they have none in common."""
    specs = [tf.TensorSpec(one.shape, tf.as_dtype(one.dtype)) for one in (first, last)]
    found = specs[0].most_specific_common_supertype(specs[1:])
    if found is None:
        raise TypeError(f"{specs[0]} and {specs[1]}.")
    return found


def _fits(array: Any, spec: Any) -> bool:
    shape: Any = spec.shape
    return bool(tf.as_dtype(array.dtype) == spec.dtype and shape.is_compatible_with(array.shape))


def _described(example: Any) -> str:
    kinds = tf.nest.map_structure(
        lambda one: None if one is None else f"{tf.as_dtype(one.dtype).name}{list(one.shape)}",
        example,
    )
    return f"{kinds!r}"


def _arrays_of(example: Any) -> Any:
    return tf.nest.map_structure(_array_of, example)


def _array_of(value: Any) -> Any:
    if value is None:
        return None
    # An array of bytes would lose the zeros at their end.
    return np.asarray(value, object) if isinstance(value, (bytes, str)) else np.asarray(value)


def _check_not_empty(source: Any, rows: int) -> None:
    if not rows:
        raise DataError(f"The source has no examples. Received: {type(source).__name__}.")
