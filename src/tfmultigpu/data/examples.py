"""Sources of single examples, which are cheap until they are read or preprocessed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import structure_of, tensors_of
from tfmultigpu.data.sources import check_not_distributed, fill, tensors_of_arrays
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.worker_exchange import digest_of

_SAMPLED_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples one after the other, or by number.

    Attributes:
        elements: A dataset of the examples, or of their numbers.
        read: From the number of an example, an int64 scalar, to the example; None if the elements
            are the examples.
        rows: How many there are, if they are read by number; else None.
    """

    elements: tf.data.Dataset[Any]
    read: Callable[[Any], Any] | None = None
    rows: int | None = None


def examples_of(source: Any) -> Examples:
    """Returns the examples of a source."""
    check_not_distributed(source)
    if isinstance(source, tf.data.Dataset):
        return Examples(source)
    is_array = tf.nest.is_nested(source) or hasattr(source, "__array__")
    if not is_array and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _indexable(source)
    if callable(source):
        raise DataError(
            "preprocess takes single examples: a tf.data.Dataset of them, arrays, or an object "
            f"with len(source) and source[i]. Received: {type(source).__name__}. For a generator, "
            "write tf.data.Dataset.from_generator(f, output_signature=...)."
        )
    arrays = tensors_of_arrays(source)
    slices = tf.data.Dataset.from_tensor_slices(tuple(tensors_of(arrays)))
    _check_not_empty(source, int(slices.cardinality()))
    return Examples(slices.map(functools.partial(fill, arrays)))


def mark_of(read: Callable[[Any], Any], rows: int) -> int:
    """Returns a digest of some examples and of their types, by which data is recognised."""
    some = (*range(0, rows, max(rows // _SAMPLED_ROWS, 1)), rows - 1)
    sampled = tf.nest.flatten([read(number) for number in some], expand_composites=True)
    present = [leaf for leaf in sampled if leaf is not None]
    return digest_of(b"".join(tf.io.serialize_tensor(leaf).numpy() for leaf in present))


def _indexable(source: Any) -> Examples:
    rows = check_count("len(source)", len(source), 0)
    _check_not_empty(source, rows)
    first, last = (_arrays_of(source[number]) for number in (0, rows - 1))
    structure = structure_of(first)
    pairs = zip(tensors_of(first), tensors_of(last), strict=False)
    specs = [
        _spec_of(one).most_specific_common_supertype([_spec_of(other)]) for one, other in pairs
    ]
    if structure_of(last) != structure or None in specs:
        raise DataError(_differs(rows - 1, last, first))

    def item(number: Any) -> list[Any]:
        example = _arrays_of(source[int(number)])
        leaves = tensors_of(example)
        if structure_of(example) != structure or not all(
            spec.is_compatible_with(_spec_of(leaf))
            for spec, leaf in zip(specs, leaves, strict=True)
        ):
            raise DataError(_differs(int(number), example, first))
        return leaves

    def read(number: Any) -> Any:
        tensors = tf.numpy_function(item, [number], [spec.dtype for spec in specs])
        # Called eagerly it returns a single tensor as it is, not in a list.
        tensors = [tensors] if tf.is_tensor(tensors) else tensors
        pairs = zip(tensors, specs, strict=True)
        return fill(first, *[tf.ensure_shape(one, spec.shape) for one, spec in pairs])

    return Examples(tf.data.Dataset.range(rows), read, rows)


def _spec_of(array: Any) -> Any:
    return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))


def _differs(number: int, example: Any, first: Any) -> str:
    received, expected = (
        tf.nest.map_structure(lambda a: None if a is None else str(_spec_of(a)), each)
        for each in (example, first)
    )
    return (
        f"Example {number} differs from the first. Received: {received!r}, after {expected!r}. "
        "Give all of them one structure, dtype and number of axes."
    )


def _arrays_of(example: Any) -> Any:
    return tf.nest.map_structure(_array_of, example)


def _array_of(value: Any) -> Any:
    if value is None:
        return None
    # An array of bytes would lose the zeros at their end.
    return np.asarray(value, object) if isinstance(value, (bytes, str)) else np.asarray(value)


def _check_not_empty(source: Any, rows: int) -> None:
    if not rows:
        raise DataError(f"There are no examples. Received: {type(source).__name__} of length 0.")
