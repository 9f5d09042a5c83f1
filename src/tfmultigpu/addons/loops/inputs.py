"""Data of the user as what the loop of Keras takes."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu.addons.loops.arrays import passes_over, shard_arrays
from tfmultigpu.addons.loops.class_weights import weighting
from tfmultigpu.addons.loops.feed import Feed, PredictFeed
from tfmultigpu.addons.loops.loop import no_batches
from tfmultigpu.addons.loops.own_methods import METHODS, own_methods
from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.examples import examples_of, mark_of
from tfmultigpu.data.other_packages import read_tables, with_tables
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.data.preprocessing import Preprocessing
from tfmultigpu.data.resumable import PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.data.sources import tensors_of_arrays, to_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.topology import describe

__all__ = [
    "as_keras_casts",
    "check_steps",
    "labelled",
    "pass_feed",
    "split_off",
    "training_feed",
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


def labelled(model: Any, data: Any, x: Any, y: Any, weight: Any, function: str) -> Any:
    """Returns the data of a call with Keras' arguments ``x``, ``y`` and ``sample_weight``.

    Raises:
        DataError: Labels or weights are given beside data that holds them.
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
    if y is not None:
        # A list of arrays, for several inputs or outputs, is a tuple to Keras.
        data, y = (
            tuple(part)
            if isinstance(part, list) and any(getattr(leaf, "ndim", 0) for leaf in part)
            else part
            for part in (data, y)
        )
        _check_arrays(data, _is_arrays(data), "y")
        data = (data, y)
    if weight is not None:
        is_pair = isinstance(data, tuple) and len(data) == 2 and _is_arrays(data)
        _check_arrays(data, is_pair, "sample_weight")
        data = (*data, weight)
    return as_keras_casts(model, data)


def _check_arrays(data: Any, are_arrays: bool, beside: str) -> None:
    if not are_arrays:
        raise DataError(
            f"{beside} works only for arrays (x, y). Received: {beside} with data of type "
            f"{type(data).__name__}. Let the dataset yield (x, y) or (x, y, sample_weight)."
        )


def as_keras_casts(model: Any, data: Any) -> Any:
    """Returns arrays with floats in ``keras.config.floatx()`` if a model has steps of its own.

    Our steps cast; Keras casts arrays, and nothing else.
    """
    import keras

    if data is None or not own_methods(model, *METHODS) or not _is_arrays(data):
        return data
    floatx = keras.config.floatx()

    def cast(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (bool, int, float, str, types.GeneratorType)):
            return leaf
        if tf.is_tensor(leaf):
            return tf.cast(leaf, floatx) if leaf.dtype.is_floating else leaf
        array = np.asarray(leaf)
        return array.astype(floatx) if np.issubdtype(array.dtype, np.floating) else leaf

    return tf.nest.map_structure(cast, read_tables(data))


def split_off(data: Any, validation_split: float) -> tuple[Any, Any]:
    """Splits arrays into the training part and the last part, for validation.

    Raises:
        DataError: The data is not arrays, or has too few examples to split.
        ValueError: ``validation_split`` is not between 0 and 1.
    """
    if isinstance(validation_split, str) or not 0 < validation_split < 1:
        raise ValueError(
            "validation_split must be a fraction of the data, between 0 and 1. "
            f"Received: validation_split={validation_split!r}."
        )
    if not _is_arrays(data):
        raise DataError(
            "validation_split works only for arrays. Received: data of type "
            f"{type(data).__name__}. Split a dataset with take() and skip(), and give "
            "validation_data."
        )
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    at = math.floor(rows * (1.0 - validation_split))
    if not 0 < at < rows:
        raise DataError(
            f"{rows} examples are too few to split. Received: validation_split="
            f"{validation_split}, which leaves {at} examples to train on. Give more data, or "
            "another fraction."
        )
    return slice_rows(arrays, 0, at), slice_rows(arrays, at, rows)


def pass_feed(
    model: Any,
    purpose: str,
    data: Any,
    strategy: tf.distribute.Strategy,
    batch_size: int | None,
    steps: int | None,
) -> Feed:
    """Returns data for one pass after the other, each from its beginning.

    Args:
        model: The model, which keeps the pipeline of arrays.
        purpose: ``"validation"``, ``"evaluation"`` or ``"prediction"``.
        data: Arrays, a source of global batches, or a ``ShardedDataset``.
        strategy: The strategy of the model.
        batch_size: Examples in a global batch, for arrays; None means 32.
        steps: The most batches of a pass, or None.

    Raises:
        DataError: The data is infinite and ``steps`` is None, is of an unknown kind, or was
            distributed for another strategy.
    """
    kind = PredictFeed if purpose == "prediction" else Feed
    if _is_arrays(data):
        arrays, size = tensors_of_arrays(data), _checked_size(batch_size)
        rows = int(count_rows(arrays))
        if not rows:
            raise no_batches(data)
        repeats = purpose == "validation"  # One iterator for all passes, which is faster.
        batches = shard_arrays(model, purpose, strategy, arrays, size, endless=repeats)
        return kind(data, batches, -(-rows // size), steps, repeats=repeats)
    if isinstance(data, ShardedDataset):
        batches = _checked_shards(data, strategy, batch_size)
    else:
        own_size = None if purpose == "validation" else batch_size
        batches = distribute_dataset(data, strategy, batch_size=own_size)
    name = "validation_steps" if purpose == "validation" else "steps"
    return kind(data, batches, _length(data, batches, steps, name), steps)


def training_feed(
    model: Any,
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    batch_size: int | None,
    steps: int | None,
    shuffle: bool,
    seed: int,
    first_pass: int,
    class_weight: Any,
    shares: Any,
    preprocess: Any,
    preprocess_batched: bool,
) -> Feed:
    """Returns the data of a training.

    Args:
        model: The model, which keeps the pipeline of arrays.
        data: Arrays, a source of global batches, or a ``ShardedDataset``.
        strategy: The strategy of the model.
        batch_size: Examples in a global batch, for arrays. None means 32, or the size that makes
            ``steps`` batches.
        steps: Batches of an epoch, or None for a pass over the data.
        shuffle: Whether to reshuffle arrays in each pass.
        seed: Determines the order, together with the number of the pass.
        first_pass: The number of the first pass.
        class_weight: Weights of classes, or None.
        shares: Relative share of each global batch per replica, or None.
        preprocess: See ``distribute_dataset``; ``data`` is then examples.
        preprocess_batched: See ``distribute_dataset``.

    Raises:
        DataError: The data is infinite and ``steps`` is None, is empty, or is of an unknown kind.
    """
    weigh = None if class_weight is None else weighting(class_weight)

    def once(source: Any, batches: ShardedDataset) -> Feed:
        per_pass = _length(source, batches, steps, "steps_per_epoch")
        return Feed(source, batches, per_pass, steps, continues=True)

    if isinstance(data, ShardedDataset):
        _check_final(data, steps, class_weight=class_weight, shares=shares, preprocess=preprocess)
        return once(data, _checked_shards(data, strategy, batch_size))
    if preprocess is None and not _is_arrays(data):
        batches = to_dataset(data, batch_size)
        if weigh is not None:
            batches = batches.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)
        return once(data, distribute_dataset(batches, strategy, shares=shares))
    if preprocess is not None:
        examples = examples_of(data)
        rows, read = examples.rows, examples.read
    else:
        arrays = tensors_of_arrays(data)
        rows = int(count_rows(arrays))
        if not rows:
            raise no_batches(data)

        def read(row: int) -> Any:
            return slice_rows(arrays, row, row + 1)

    size = math.ceil(rows / steps) if batch_size is None and rows and steps else None
    size = size or _checked_size(batch_size)
    if preprocess is None:
        sharded = shard_arrays(
            model, "training", strategy, arrays, size, shuffle=shuffle, seed=seed,
            first_pass=first_pass, class_weight=class_weight, shares=shares,
        )  # fmt: skip
    else:
        preprocessing = Preprocessing(preprocess, preprocess_batched, seed, examples, weigh)
        whole = replica_shares(shares, strategy.num_replicas_in_sync)
        if rows is None:
            source = examples.batches(size)
            return once(data, ShardedDataset(source, strategy, whole, preprocessing=preprocessing))
        sharded = ShardedDataset(
            passes_over(tf.range(rows, dtype=tf.int64), size, shuffle, seed, first_pass),
            strategy, whole, preprocessing=preprocessing.of_passes(first_pass, rows, size),
        )  # fmt: skip

    def describe_arrays() -> dict[str, Any]:
        return {
            "rows": rows, "batch_size": size, "shuffle": shuffle, "steps_per_epoch": steps,
            "mark of some rows": mark_of(read, rows),
        }  # fmt: skip

    return Feed(
        data, sharded, math.ceil(rows / size), steps, continues=True, repeats=True,
        describe=describe_arrays,
    )  # fmt: skip


def _check_final(data: ShardedDataset, steps: int | None, **arguments: Any) -> None:
    if isinstance(data, PositionedDataset) and steps is not None:
        raise DataError(
            "Checkpointed data resumes only if an epoch is one pass; steps_per_epoch breaks "
            f"that. Received: steps_per_epoch={steps}. Give Checkpoints "
            "data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size).take(steps)."
        )
    for name, value in arguments.items():
        if value is not None:
            raise DataError(
                f"The data is already distributed, so {name} cannot be applied. Received: "
                f"{name}={value!r}. Give fit the dataset itself."
            )


def _checked_shards(
    data: ShardedDataset, strategy: tf.distribute.Strategy, batch_size: int | None
) -> ShardedDataset:
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
    return data


def _checked_size(batch_size: Any) -> int:
    """Returns the examples of a global batch of arrays; None means 32, as in Keras."""
    return 32 if batch_size is None else check_count("batch_size", batch_size, error=DataError)


def _length(data: Any, batches: ShardedDataset, steps: int | None, name: str) -> int | None:
    """Returns the batches of a pass, None if unknown; a pass without end needs ``steps``."""
    # A PyDataset knows its length, and that it has no end; the generator made of it does not.
    own = getattr(data, "num_batches", 0)
    try:
        return len(batches)
    except TypeError as error:
        if steps is None and (own is None or getattr(error, "infinite", False)):
            raise DataError(
                "The data has no end, so a pass over it would never finish. Received: "
                f"{type(data).__name__} and {name}=None. Write {name}=100, or leave out .repeat()."
            ) from None
    return int(own) if own else None


def _is_arrays(data: Any) -> bool:
    """Returns whether data consists of arrays, which need a batch size."""
    if isinstance(data, (tf.data.Dataset, tf.data.Iterator, tf.distribute.DistributedDataset)):
        return False
    kinds = (bool, int, float, str, tf.RaggedTensor, tf.SparseTensor)
    return all(
        leaf is None or hasattr(leaf, "__array__") or isinstance(leaf, kinds)
        for leaf in tf.nest.flatten(with_tables(data, lambda table: None))
    )
