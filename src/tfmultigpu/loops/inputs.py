"""What people hand over for one pass over data, as shards for the replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.errors import DataError, UnknownLengthError
from tfmultigpu.strategies.topology import describe

__all__ = [
    "check_shards",
    "check_steps",
    "has_no_end",
    "is_arrays",
    "length",
    "no_batches",
    "pass_batches",
    "with_weights",
]


def check_steps(steps: Any, name: str = "steps") -> None:
    """Checks a number of batches, and that a pass is not asked for inside a ``tf.function``."""
    if tf.inside_function():
        raise DataError(
            "fit, evaluate and predict go over whole data and return numbers, so they cannot be "
            "part of a tf.function. Call them outside of it; inside, call the steps that "
            "tmg.make_train_step, tmg.make_eval_step and tmg.make_predict_step return."
        )
    if steps is not None:
        check_count(name, steps, other="None")


def pass_batches(
    data: Any,
    strategy: tf.distribute.Strategy,
    batch_size: int | None,
    steps: int | None,
    name: str = "steps",
) -> ShardedDataset:
    """Returns shards for the replicas; refuses data without end where ``steps`` is None.

    Args:
        data: Arrays, a source of global batches, or a ``ShardedDataset``.
        strategy: Where the model lives.
        batch_size: Rows of a global batch, for arrays; 32 where None.
        steps: Batches at most, or None.
        name: How the caller's caller calls ``steps``.

    Raises:
        DataError: The data has no end, is none, or was distributed for something else.
    """
    if isinstance(data, ShardedDataset):
        check_shards(data, strategy, batch_size)
        batches = data
    else:
        if batch_size is None and is_arrays(data):
            batch_size = 32
        batches = distribute_dataset(data, strategy, batch_size=batch_size)
    if steps is None and has_no_end(data, batches):
        raise DataError(
            "The data has no end, so a pass over it would never finish. Received: "
            f"{type(data).__name__} and {name}=None. Say how many batches: {name}=100, or leave "
            "out .repeat()."
        )
    return batches


def check_shards(
    data: ShardedDataset, strategy: tf.distribute.Strategy, batch_size: int | None
) -> None:
    """Checks data that is already distributed.

    Raises:
        DataError: It was for another strategy, or there is a batch size beside it.
    """
    if data.strategy is not strategy:
        raise DataError(
            "The data was distributed for another strategy than the one the model was created "
            f"in. Received: data for {describe(data.strategy)}; a model of {describe(strategy)}. "
            "Give the dataset itself, or distribute it for the strategy of the model: "
            "tmg.distribute_dataset(dataset, strategy)."
        )
    if batch_size is not None:
        raise DataError(
            f"batch_size is for arrays. Received: batch_size={batch_size} with data that is "
            "already distributed."
        )


def has_no_end(data: Any, batches: Any) -> bool:
    """Returns whether a pass over data is known never to end."""
    if getattr(data, "num_batches", 0) is None:
        return True  # A PyDataset says so in this way.
    try:
        len(batches)
    except UnknownLengthError as error:
        return error.infinite
    return False


def length(data: Any, batches: ShardedDataset) -> int | None:
    """Returns the number of batches of a pass; None where it is not known, or none."""
    try:
        return len(batches)
    except UnknownLengthError:
        # A PyDataset knows what the generator made of it does not.
        count = getattr(data, "num_batches", None)
        return None if count is None else int(count)


def is_arrays(data: Any) -> bool:
    """Returns whether data is arrays, to be cut into batches by us."""
    if isinstance(data, (tf.data.Dataset, tf.data.Iterator, tf.distribute.DistributedDataset)):
        return False
    kinds = (bool, int, float, str, tf.RaggedTensor, tf.SparseTensor)
    return all(
        leaf is None or hasattr(leaf, "__array__") or isinstance(leaf, kinds)
        for leaf in tf.nest.flatten(data)
    )


def with_weights(data: Any, sample_weight: Any) -> Any:
    """Returns ``(x, y, sample_weight)`` for arrays ``(x, y)``.

    Raises:
        DataError: The data is no pair of arrays.
    """
    if not (isinstance(data, tuple) and len(data) == 2 and is_arrays(data)):
        raise DataError(
            "sample_weight is for arrays (x, y). Received: sample_weight with data of type "
            f"{type(data).__name__}. A dataset yields the weights itself: (x, y, sample_weight)."
        )
    return (*data, sample_weight)


def no_batches(data: Any) -> DataError:
    """Returns the error for data that turned out to be empty."""
    return DataError(
        f"The data has no batches. Received: {type(data).__name__}. Check its source, or a "
        "filter or take() that leaves nothing."
    )
