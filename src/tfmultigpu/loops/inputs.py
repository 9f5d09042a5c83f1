"""Conversion of user data to shards for one pass, and its checks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data.other_packages import with_tables
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.sources import tensors_of_arrays
from tfmultigpu.errors import DataError
from tfmultigpu.loops.array_batches import shard_arrays
from tfmultigpu.strategies.topology import describe

__all__ = [
    "check_ends",
    "check_shards",
    "check_steps",
    "checked_batch_size",
    "is_arrays",
    "labelled",
    "length",
    "no_batches",
    "pass_batches",
    "with_weights",
]


def check_steps(steps: Any, name: str = "steps") -> None:
    """Checks a number of batches, and that the caller is not inside a ``tf.function``."""
    if tf.inside_function():
        raise DataError(
            "fit, evaluate and predict read all data and return numbers, so they cannot run inside "
            "a tf.function. Call them outside. Inside, call a step of tmg.make_train_step, "
            "tmg.make_eval_step or tmg.make_predict_step."
        )
    if steps is not None:
        check_count(name, steps, other="None")


def pass_batches(
    model: Any,
    purpose: str,
    data: Any,
    strategy: tf.distribute.Strategy,
    batch_size: int | None,
    steps: int | None,
    name: str = "steps",
) -> ShardedDataset:
    """Returns one pass over data, as shards for the replicas.

    Args:
        model: See ``shard_arrays``.
        purpose: See ``shard_arrays``.
        data: Arrays, a source of global batches, or a ``ShardedDataset``.
        strategy: The strategy of the model.
        batch_size: Examples in a global batch, for arrays; None means 32.
        steps: The largest number of batches, or None.
        name: The name of ``steps`` in messages.

    Raises:
        DataError: The data is infinite and ``steps`` is None, is of an unknown kind, or was
            distributed for another strategy.
    """
    if isinstance(data, ShardedDataset):
        check_shards(data, strategy, batch_size)
        batches = data
    elif is_arrays(data):
        arrays, size = tensors_of_arrays(data), checked_batch_size(batch_size)
        batches = shard_arrays(model, purpose, strategy, arrays, size, endless=False)
    else:
        batches = distribute_dataset(data, strategy, batch_size=batch_size)
    check_ends(data, batches, steps, name)
    return batches


def checked_batch_size(batch_size: Any) -> int:
    """Returns the examples of a global batch of arrays; None means 32, as in Keras."""
    return 32 if batch_size is None else check_count("batch_size", batch_size, error=DataError)


def check_ends(data: Any, batches: ShardedDataset, steps: int | None, name: str) -> None:
    """Checks that a pass over data ends.

    Raises:
        DataError: The data is infinite and ``steps`` is None.
    """
    if steps is None and _has_no_end(data, batches):
        raise DataError(
            "The data has no end, so a pass over it would never finish. Received: "
            f"{type(data).__name__} and {name}=None. Write {name}=100, or leave out .repeat()."
        )


def check_shards(
    data: ShardedDataset, strategy: tf.distribute.Strategy, batch_size: int | None
) -> None:
    """Checks data that is already distributed.

    Raises:
        DataError: It was distributed for another strategy, or ``batch_size`` is set.
    """
    if data.strategy is not strategy:
        raise DataError(
            "The data was distributed for another strategy than that of the model. Received: data "
            f"for {describe(data.strategy)}; a model of {describe(strategy)}. Give the dataset "
            "itself, or write tmg.distribute_dataset(dataset, strategy)."
        )
    if batch_size is not None:
        raise DataError(
            f"batch_size works only for arrays. Received: batch_size={batch_size} with data that "
            "is already distributed. Leave it out."
        )


def _has_no_end(data: Any, batches: Any) -> bool:
    """Returns whether data is known to be infinite."""
    if getattr(data, "num_batches", 0) is None:
        return True  # Keras: an infinite PyDataset.
    return bool(batches.cardinality() == tf.data.INFINITE_CARDINALITY)


def length(data: Any, batches: ShardedDataset) -> int | None:
    """Returns the number of batches of a pass; None if unknown or infinite."""
    if batches.cardinality() >= 0:
        return batches.cardinality()
    # A PyDataset knows its length; the generator made of it does not.
    count = getattr(data, "num_batches", None)
    return None if count is None else int(count)


def is_arrays(data: Any) -> bool:
    """Returns whether data consists of arrays, which need a batch size."""
    if isinstance(data, (tf.data.Dataset, tf.data.Iterator, tf.distribute.DistributedDataset)):
        return False
    kinds = (bool, int, float, str, tf.RaggedTensor, tf.SparseTensor)
    return all(
        leaf is None or hasattr(leaf, "__array__") or isinstance(leaf, kinds)
        for leaf in tf.nest.flatten(with_tables(data, lambda table: None))
    )


def labelled(data: Any, x: Any, y: Any, function: str = "fit") -> Any:
    """Returns the data of a call with Keras' arguments ``x`` and ``y``.

    Args:
        data: The argument ``data``.
        x: The argument ``x``.
        y: The argument ``y``.
        function: The name of the called function.

    Raises:
        DataError: Labels are given beside data that holds them.
        TypeError: No data is given, or it is given twice.
    """
    if (data is None) == (x is None):
        raise TypeError(
            "fit, evaluate and predict take one data argument. Received: "
            f"{'none' if x is None else 'data beside x'}. Write tmg.{function}(model, data)."
        )
    if y is not None and isinstance(data, tuple):
        raise DataError(
            "A tuple is (x, y), so it holds labels already. Received: a tuple of "
            f"{len(data)} beside y. Write tmg.{function}(model, (x, y)); or, for several inputs, "
            f"tmg.{function}(model, [first, second], y)."
        )
    data = x if data is None else data
    if y is None:
        return data
    data, y = (_as_structure(one) for one in (data, y))
    if not is_arrays(data):
        raise DataError(
            "y works only for arrays. Received: y with data of type "
            f"{type(data).__name__}. Let the dataset yield (x, y)."
        )
    return data, y


def _as_structure(arrays: Any) -> Any:
    """Returns a list of arrays, for several inputs or outputs, as a tuple, as Keras does."""
    if isinstance(arrays, list) and any(getattr(one, "ndim", 0) for one in arrays):
        return tuple(arrays)
    return arrays


def with_weights(data: Any, sample_weight: Any) -> Any:
    """Returns ``(x, y, sample_weight)`` for arrays ``(x, y)``.

    Raises:
        DataError: The data is not a pair of arrays.
    """
    if not (isinstance(data, tuple) and len(data) == 2 and is_arrays(data)):
        raise DataError(
            "sample_weight works only for arrays (x, y). Received: sample_weight with data of type "
            f"{type(data).__name__}. Let the dataset yield (x, y, sample_weight)."
        )
    return (*data, sample_weight)


def no_batches(data: Any) -> DataError:
    """Returns the error for empty data."""
    return DataError(
        f"The data has no batches. Received: {type(data).__name__}. Check its source, or a "
        "filter or take() that leaves nothing."
    )
