"""Conversion of training data to an ``EpochIterator``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.examples import examples_of, mark_of
from tfmultigpu.data.partition import slice_rows
from tfmultigpu.data.preprocessing import Preprocessing
from tfmultigpu.data.resumable import PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.data.sources import tensors_of_arrays, to_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.loops.array_batches import passes_over, shard_arrays
from tfmultigpu.loops.class_weights import weighting
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.inputs import (
    check_ends,
    check_shards,
    checked_batch_size,
    is_arrays,
    length,
    no_batches,
)

__all__ = ["make_epoch_iterator", "split_off"]


def make_epoch_iterator(
    model: Any,
    data: Any,
    strategy: tf.distribute.Strategy,
    *,
    batch_size: int | None,
    steps_per_epoch: int | None,
    shuffle: bool,
    seed: int,
    first_pass: int,
    class_weight: Any,
    shares: Sequence[float] | None,
    preprocess: Callable[..., Any] | None = None,
    preprocess_batched: bool = False,
) -> tuple[EpochIterator, Any]:
    """Returns the batches of each epoch, and their type specs.

    Args:
        model: The model, which keeps the traced pipeline of arrays.
        data: Arrays, a source of global batches, or a ``ShardedDataset``.
        strategy: The strategy of the model.
        batch_size: Examples in a global batch, for arrays. None means 32, or the size that makes
            ``steps_per_epoch`` batches.
        steps_per_epoch: Batches of an epoch, or None for a pass over the data.
        shuffle: Whether to reshuffle arrays in each pass.
        seed: Determines the order, together with the number of the pass.
        first_pass: The number of the first pass.
        class_weight: Weights of classes, or None.
        shares: Relative share of each global batch per replica, or None.
        preprocess: See ``distribute_dataset``; ``data`` is then examples.
        preprocess_batched: See ``distribute_dataset``.

    Raises:
        DataError: The data is infinite and ``steps_per_epoch`` is None, is empty, or is of an
            unknown kind.
    """
    if isinstance(data, ShardedDataset):
        check_shards(data, strategy, batch_size)
        if isinstance(data, PositionedDataset) and steps_per_epoch is not None:
            raise DataError(
                "Checkpointed data resumes only if an epoch is one pass; steps_per_epoch breaks "
                f"that. Received: steps_per_epoch={steps_per_epoch}. Give Checkpoints "
                "data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size).take(steps)."
            )
        given = {"class_weight": class_weight, "shares": shares, "preprocess": preprocess}
        for name, value in given.items():
            if value is not None:
                raise DataError(
                    f"The data is already distributed, so {name} cannot be applied. Received: "
                    f"{name}={value!r}. Give fit the dataset itself."
                )
        return _iterate(data, data, steps_per_epoch)
    if preprocess is not None:
        examples = examples_of(data)
        rows = examples.rows
        batch_size = _size_of_batches(batch_size, rows, steps_per_epoch)
        weigh = None if class_weight is None else weighting(class_weight)
        preprocessing = Preprocessing(preprocess, preprocess_batched, seed, examples, weigh)
        whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)
        if rows is None:
            batches = examples.batches(batch_size)
            sharded = ShardedDataset(batches, strategy, whole_shares, preprocessing=preprocessing)
            return _iterate(data, sharded, steps_per_epoch)
        numbers = tf.range(rows, dtype=tf.int64)
        sharded = ShardedDataset(
            passes_over(numbers, batch_size, shuffle, seed, first_pass),
            strategy,
            whole_shares,
            preprocessing=preprocessing.of_passes(first_pass, rows, batch_size),
        )
        return _over_passes(sharded, rows, batch_size, shuffle, steps_per_epoch, examples.read)
    if not is_arrays(data):
        batches = to_dataset(data, batch_size)
        if class_weight is not None:
            weigh = weighting(class_weight)
            batches = batches.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)
        return _iterate(data, distribute_dataset(batches, strategy, shares=shares), steps_per_epoch)
    arrays = tensors_of_arrays(data)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    batch_size = _size_of_batches(batch_size, rows, steps_per_epoch)
    sharded = shard_arrays(
        model,
        "training on arrays",
        strategy,
        arrays,
        batch_size,
        shuffle=shuffle,
        seed=seed,
        first_pass=first_pass,
        class_weight=class_weight,
        shares=shares,
    )

    def row(number: int) -> Any:
        return slice_rows(arrays, number, number + 1)

    return _over_passes(sharded, rows, batch_size, shuffle, steps_per_epoch, row)


def _size_of_batches(batch_size: Any, rows: int | None, steps: int | None) -> int:
    if batch_size is None and rows and steps:
        return math.ceil(rows / steps)
    return checked_batch_size(batch_size)


def _over_passes(
    sharded: ShardedDataset,
    rows: int,
    batch_size: int,
    shuffle: bool,
    steps: int | None,
    row: Any,
) -> tuple[EpochIterator, Any]:
    """Returns the batches of data that goes through pass after pass, and their type specs."""

    def describe() -> dict[str, Any]:
        return {
            "rows": rows,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "steps_per_epoch": steps,
            "mark of some rows": mark_of(row, rows),
        }

    per_pass = math.ceil(rows / batch_size)
    iterator = EpochIterator(sharded, per_pass, steps, repeats=True, describe=describe)
    return iterator, sharded.element_spec


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
    if isinstance(data, ShardedDataset) or not is_arrays(data):
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


def _iterate(data: Any, batches: ShardedDataset, steps: int | None) -> tuple[EpochIterator, Any]:
    check_ends(data, batches, steps, "steps_per_epoch")
    return EpochIterator(batches, length(data, batches), steps), batches.element_spec
