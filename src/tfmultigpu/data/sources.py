"""Conversion of user data to a ``tf.data.Dataset`` of global batches, or of single examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.arguments import brief, check_count
from tfmultigpu.data.batch_format import count_rows, holds_arrays, lists_to_tuples, tensors_of
from tfmultigpu.data.reader import Reader
from tfmultigpu.errors import DataError
from tfmultigpu.types import Batches, Tensor


class GlobalBatches(NamedTuple):
    """Data as a dataset of global batches, which can be iterated any number of times.

    Attributes:
        dataset: The batches.
        reader: What makes them in Python; None if TensorFlow does.
    """

    dataset: Batches
    reader: Reader | None = None


def global_batches(data: Any, batch_size: int | None = None) -> GlobalBatches:
    """Returns data of any kind as global batches."""
    check_not_distributed(data)
    if isinstance(data, (Iterator, tf.data.Iterator)):
        raise DataError(
            "An iterator can be read once, and inspecting it would lose batches.",
            type(data).__name__,
            "Give its function, make_batches, not make_batches().",
        )
    reader = None
    is_dataset = isinstance(data, tf.data.Dataset)
    if not is_dataset and callable(data):
        reader = Reader.of_function(data)
    elif not is_dataset and not is_arrays(data):
        reader = Reader.of_keras(data)
    if not is_dataset and reader is None:
        arrays = tensors_of_arrays(data)
        if batch_size is None:
            raise DataError(
                "Arrays need the size of a global batch.",
                "batch_size=None",
                "Write tmg.distribute_dataset((x, y), strategy, batch_size=64).",
            )
        batch_size = check_count("batch_size", batch_size, error=DataError)
        return GlobalBatches(untuned(tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)))
    if batch_size is not None:
        raise DataError(
            f"batch_size is for arrays, and a {type(data).__name__} yields batches by itself.",
            f"batch_size={batch_size}",
            "Leave batch_size out of this call. If the data has single examples, add "
            f".batch({batch_size}) in the line that makes the dataset.",
        )
    if reader is None:
        return GlobalBatches(data)
    return GlobalBatches(batches_of(reader), reader)


def batches_of(reader: Reader) -> Batches:
    """Returns what a reader reads as a dataset."""
    return untuned(tf.data.Dataset.from_generator(reader, output_signature=reader.spec))


def untuned(dataset: Batches, *, optimized: bool = True) -> Batches:
    """Turns tuning off: dropping an iterator waits for the tuner's thread, up to a minute.

    Args:
        dataset: The dataset.
        optimized: False for data that is never read: to optimise it takes as long as to begin it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    if not optimized:  # TensorFlow warns if a dataset that has a value gets another.
        options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def to_examples(source: Any) -> Batches:
    """Returns data as a dataset of single examples."""
    check_not_distributed(source)
    if isinstance(source, tf.data.Dataset):
        return source
    if not is_arrays(source):
        raise DataError(
            "preprocess takes single examples: a tf.data.Dataset of them, or arrays.",
            type(source).__name__,
            "For an object with source[i] give the numbers, np.arange(len(source)), and read in "
            "preprocess: tf.numpy_function(lambda i: source[i], [number], dtype).",
        )
    return tf.data.Dataset.from_tensor_slices(tensors_of_arrays(source))


def check_not_distributed(data: Any) -> None:
    """Checks that data is not distributed already."""
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedValues)):
        raise DataError(
            "The data is already distributed.",
            type(data).__name__,
            "Give the original data, from which global batches are formed.",
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
    if isinstance(data, list) and any(map(holds_arrays, data)):
        data = (data,)
    try:
        arrays = tf.nest.map_structure(_array_to_tensor, lists_to_tuples(data))
    except DataError:
        raise
    except (TypeError, ValueError) as error:
        received = brief(data) if isinstance(data, (str, int, float)) else type(data).__name__
        raise DataError(
            f"The data cannot be distributed: {error}.",
            received,
            "Give a tf.data.Dataset of global batches, or arrays with batch_size. For an iterable "
            "of batches give a function that returns it: lambda: it.",
        ) from None
    leaves = tensors_of(arrays)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if not leaves or () in shapes or len({int(count_rows(leaf)) for leaf in leaves}) > 1:
        raise DataError(
            "Arrays are paired by rows, so each needs one row per example.", f"shapes {shapes}"
        )
    return arrays


def _array_to_tensor(value: Any) -> Tensor:
    if value is None or tf.is_tensor(value):
        return value
    value = columns_as_array(value)
    if not hasattr(value, "__array__"):
        raise TypeError(f"{type(value).__name__} is not an array")
    with tf.device("CPU:0"):  # Where tf.data reads it: all data need not fit into a GPU.
        return tf.convert_to_tensor(value)


def columns_as_array(value: Any) -> Any:
    """Returns a ``DataFrame`` or a ``Series`` as an array of rank 2; any other value unchanged.

    Columns of one type keep it. Numbers and booleans together, of which NumPy makes Python objects,
    become ``keras.config.floatx()``. A ``Series`` is one column, as in Keras.
    """
    import keras

    pandas: Any = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, (pandas.DataFrame, pandas.Series)):
        return value
    frame = value
    if isinstance(value, pandas.Series):
        frame = value.to_frame()
    array = frame.to_numpy()
    if array.dtype != object:
        return array
    if all(map(pandas.api.types.is_numeric_dtype, frame.dtypes)):  # Booleans are numeric here.
        return frame.to_numpy(dtype=keras.config.floatx())
    if all(isinstance(item, str) for item in array.ravel()):
        return array
    raise DataError(
        "The columns of a DataFrame make one array if they are numbers and booleans, or text.",
        f"columns {dict(frame.dtypes.astype(str))}",
        "Write pandas.get_dummies(frame) for columns of text, or give a dict of columns: {name: "
        "frame[name] for name in frame}.",
    )
