"""What people have as data, turned into a ``tf.data.Dataset`` of global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.errors import DataError

__all__ = ["to_dataset"]


def to_dataset(data: Any, batch_size: int | None = None) -> tf.data.Dataset:
    """Returns data as a dataset of global batches.

    Args:
        data: A ``tf.data.Dataset`` of batches, a ``keras.utils.PyDataset``, a function without
            arguments that returns a fresh generator of batches, or arrays (one, or a tuple or dict
            of them) that agree in their first axis.
        batch_size: Rows of a global batch, for arrays only.

    Returns:
        A dataset that can be iterated any number of times.

    Raises:
        DataError: The data is already distributed, one-shot, or not data; arrays without
            ``batch_size``, or ``batch_size`` without arrays.
    """
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedValues)):
        raise DataError(
            f"The data is already distributed. Received: {type(data).__name__}. Give the "
            "tf.data.Dataset of global batches it was made from."
        )
    if isinstance(data, tf.data.Dataset):
        _no_batch_size(data, batch_size, "dataset.batch(batch_size)")
        return data
    if _is_py_dataset(data):
        _no_batch_size(data, batch_size, "the batch size of the PyDataset itself")
        if len(data) == 0:
            raise DataError(f"The PyDataset has no batches. Received: {data!r}, len() of 0.")
        return _from_generator(lambda: _py_dataset_batches(data), data[0])
    if isinstance(data, Iterator) or isinstance(data, tf.data.Iterator):
        raise DataError(
            f"An iterator can be read once, and looking at it would lose batches. Received: "
            f"{type(data).__name__}. Give the function that makes it: "
            "tmg.distribute_dataset(make_batches), not tmg.distribute_dataset(make_batches())."
        )
    if callable(data):
        _no_batch_size(data, batch_size, "batches of that size from the generator")
        first = next(iter(data()), None)
        if first is None:
            raise DataError(f"The generator yields no batches. Received: {data!r}.")
        return _from_generator(data, first)
    return _from_arrays(data, batch_size)


def _from_arrays(data: Any, batch_size: int | None) -> tf.data.Dataset:
    if isinstance(data, list):
        data = np.asarray(data) if not any(hasattr(item, "shape") for item in data) else tuple(data)
    try:
        arrays = tf.nest.map_structure(_as_tensor, data)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"This is not data that can be distributed: {error}. Received: {type(data).__name__}. "
            "Give a tf.data.Dataset of global batches, or arrays with batch_size."
        ) from None
    leaves = [leaf for leaf in tf.nest.flatten(arrays) if leaf is not None]
    if batch_size is None or batch_size < 1:
        raise DataError(
            f"Arrays need a batch size of at least 1. Received: batch_size={batch_size}. "
            "Write tmg.distribute_dataset((x, y), batch_size=64), with the size of a global batch."
        )
    sizes = [1 if leaf.shape.rank == 0 else leaf.shape[0] for leaf in leaves]
    if len(set(sizes)) > 1 or any(leaf.shape.rank == 0 for leaf in leaves):
        raise DataError(
            "The arrays differ in their number of rows, so they cannot be paired. Received: shapes "
            f"{[tuple(leaf.shape) for leaf in leaves]}."
        )
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def _as_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        raise TypeError(f"{type(value).__name__} is not an array")
    return tf.convert_to_tensor(value)


def _from_generator(make_batches: Callable[[], Any], first: Any) -> tf.data.Dataset:
    first = _as_structure(first)
    signature = tf.nest.map_structure(lambda leaf: _any_rows(tf.type_spec_from_value(leaf)), first)
    return tf.data.Dataset.from_generator(
        lambda: map(_as_structure, make_batches()), output_signature=signature
    )


def _as_structure(batch: Any) -> Any:
    """A list would be stacked by tf.data; a batch made of several arrays is a tuple."""
    if isinstance(batch, list):
        batch = tuple(batch)
    return tf.nest.map_structure(
        lambda leaf: leaf if tf.is_tensor(leaf) else np.asarray(leaf), batch
    )


def _any_rows(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
        return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, *spec.shape[1:]], spec.dtype, spec.ragged_rank)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _py_dataset_batches(data: Any) -> Iterator[Any]:
    for index in range(len(data)):
        yield data[index]
    data.on_epoch_end()


def _is_py_dataset(data: Any) -> bool:
    import keras

    return isinstance(data, keras.utils.PyDataset)


def _no_batch_size(data: Any, batch_size: int | None, instead: str) -> None:
    if batch_size is not None:
        raise DataError(
            f"batch_size is for arrays. Received: batch_size={batch_size} with a "
            f"{type(data).__name__}, which already yields batches; use {instead}."
        )
