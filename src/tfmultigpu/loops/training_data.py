"""What people hand over for training, as the batches of each epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.resumable import PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.sources import to_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.loops.class_weights import weighting
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.inputs import check_shards, has_no_end, is_arrays, length, no_batches
from tfmultigpu.strategies.worker_exchange import digest_of

__all__ = ["make_feed", "split_off"]

_SAMPLED_ROWS = 16


def make_feed(
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
) -> tuple[EpochIterator, Any]:
    """Returns the batches of each epoch, and their types.

    Args:
        data: Arrays, a source of global batches, or a ``ShardedDataset``.
        strategy: Where the model lives.
        batch_size: Rows of a global batch, for arrays; None: 32, or what makes
            ``steps_per_epoch`` batches of them.
        steps_per_epoch: Batches of an epoch, or None for a pass over the data.
        shuffle: Whether arrays are shuffled, in each pass anew.
        seed: What decides the order, together with the number of the pass.
        first_pass: The number of the first pass.
        class_weight: Weights of classes, or None.
        shares: Relative share of each global batch per replica, or None.

    Raises:
        DataError: The data has no end and ``steps_per_epoch`` is None, is empty or no data.
    """
    if isinstance(data, ShardedDataset):
        check_shards(data, strategy, batch_size)
        if isinstance(data, PositionedDataset) and steps_per_epoch is not None:
            raise DataError(
                "Data of checkpoints is gone on with by whole passes, and with steps_per_epoch an "
                "epoch is none: a shuffle would go on with another order. Received: "
                f"steps_per_epoch={steps_per_epoch}. Let an epoch be a pass: give Checkpoints "
                "data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size).take(steps)."
            )
        for name, value in (("class_weight", class_weight), ("shares", shares)):
            if value is not None:
                raise DataError(
                    f"The data is already distributed, so {name} comes too late. Received: "
                    f"{name}={value!r}. Give fit the dataset itself."
                )
        return _feed_of(data, data, steps_per_epoch)
    if not is_arrays(data):
        batches = _weighted(to_dataset(data, batch_size), class_weight)
        return _feed_of(data, distribute_dataset(batches, strategy, shares=shares), steps_per_epoch)
    arrays = _tensors(data)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    if batch_size is None:
        batch_size = math.ceil(rows / steps_per_epoch) if steps_per_epoch else 32
    to_dataset(data, batch_size)  # Checks what it is given.
    passes = _passes(arrays, rows, int(batch_size), shuffle, (seed, first_pass))
    sharded = distribute_dataset(_weighted(passes, class_weight), strategy, shares=shares)
    facts = {
        "rows": rows,
        "batch_size": int(batch_size),
        "shuffle": shuffle,
        "steps_per_epoch": steps_per_epoch,
        "mark of some rows": _mark(arrays, rows),
    }
    count = math.ceil(rows / batch_size)
    feed = EpochIterator(sharded, count, steps_per_epoch, goes_on=True, facts=facts)
    return feed, sharded.element_spec


def split_off(data: Any, validation_split: float) -> tuple[Any, Any]:
    """Returns arrays without their last part, and that.

    Raises:
        DataError: The data is no arrays, or too little to split.
        ValueError: ``validation_split`` is not between 0 and 1.
    """
    if isinstance(validation_split, str) or not 0 < validation_split < 1:
        raise ValueError(
            "validation_split is the part of the data to validate with, between 0 and 1. "
            f"Received: validation_split={validation_split!r}."
        )
    if isinstance(data, ShardedDataset) or not is_arrays(data):
        raise DataError(
            "validation_split is for arrays, of which it takes the last part. Received: data of "
            f"type {type(data).__name__}. Take it apart yourself, with take() and skip(), and "
            "give validation_data."
        )
    arrays = _tensors(data)
    rows = int(count_rows(arrays))
    at = math.floor(rows * (1.0 - validation_split))
    if not 0 < at < rows:
        raise DataError(
            f"{rows} rows are too few to split. Received: validation_split={validation_split}, "
            f"which leaves {at} rows to train on. Give more data, or another part."
        )

    def part(start: int, stop: int) -> Any:
        return tf.nest.map_structure(
            lambda one: None if one is None else _slice(one, start, stop), arrays
        )

    return part(0, at), part(at, rows)


def _feed_of(data: Any, batches: ShardedDataset, steps: int | None) -> tuple[EpochIterator, Any]:
    if steps is None and has_no_end(data, batches):
        raise DataError(
            "The data has no end, so an epoch would never finish. Received: "
            f"{type(data).__name__} and steps_per_epoch=None. Say how many batches an epoch has: "
            "steps_per_epoch=100, or leave out .repeat()."
        )
    return EpochIterator(batches, length(data, batches), steps), batches.element_spec


def _weighted(batches: tf.data.Dataset[Any], class_weight: Any) -> tf.data.Dataset[Any]:
    if class_weight is None:
        return batches
    return batches.map(weighting(class_weight), num_parallel_calls=tf.data.AUTOTUNE)


def _passes(
    arrays: Any, rows: int, batch_size: int, shuffle: bool, seed: tuple[int, int]
) -> tf.data.Dataset[Any]:
    """Pass after pass over arrays, without end; the order depends on seed and pass alone."""
    present = tuple(leaf for leaf in tf.nest.flatten(arrays) if leaf is not None)
    starts = tf.data.Dataset.range(0, rows, batch_size)
    seed_of_all, first = seed
    by_rows = any(isinstance(leaf, tf.SparseTensor) for leaf in present)

    def filled(tensors: Sequence[Any]) -> Any:
        turn = iter(tensors)
        leaves = [None if leaf is None else next(turn) for leaf in tf.nest.flatten(arrays)]
        return tf.nest.pack_sequence_as(arrays, leaves)

    def one_pass(number: Any) -> tf.data.Dataset[Any]:
        if shuffle and by_rows:  # Rows of a sparse tensor cannot be picked by their numbers.
            slices = tf.data.Dataset.from_tensor_slices(present)
            mixed = slices.shuffle(rows, seed=seed_of_all + number)
            return mixed.batch(batch_size).map(lambda *tensors: filled(tensors))
        if not shuffle:
            return starts.map(
                lambda start: filled([_slice(one, start, start + batch_size) for one in present])
            )
        shuffled: Any = tf.random
        order = shuffled.experimental.stateless_shuffle(
            tf.range(rows, dtype=tf.int64), seed=tf.stack([seed_of_all, number])
        )
        return starts.map(
            lambda start: filled(
                [tf.gather(one, order[start : start + batch_size]) for one in present]
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    numbers = tf.data.Dataset.counter(tf.constant(first, tf.int64))
    return numbers.flat_map(one_pass)


def _mark(arrays: Any, rows: int) -> int:
    """A number that depends on some rows of arrays, and on their types."""
    some = range(0, rows, max(rows // _SAMPLED_ROWS, 1))
    present = [leaf for leaf in tf.nest.flatten(arrays) if leaf is not None]
    sampled = tf.nest.flatten(
        [_slice(one, row, row + 1) for one in present for row in (*some, rows - 1)],
        expand_composites=True,
    )
    return digest_of(b"".join(tf.io.serialize_tensor(leaf).numpy() for leaf in sampled))


def _slice(tensor: Any, start: Any, stop: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:stop]
    begin = tf.concat([[start], tf.zeros_like(tensor.dense_shape)[1:]], 0)
    size = tf.concat([[stop - start], tensor.dense_shape[1:]], 0)
    return tf.sparse.slice(tensor, begin, size)


def _tensors(data: Any) -> Any:
    """Arrays as tensors, in the structure that the batches will have."""
    spec = to_dataset(data, batch_size=1).element_spec

    def convert(spec: Any, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(spec, Mapping):
            return {key: convert(spec[key], value[key]) for key in spec}
        if isinstance(spec, tuple):
            items = [convert(one, item) for one, item in zip(spec, value, strict=True)]
            return type(spec)(*items) if hasattr(spec, "_fields") else tuple(items)
        return value if tf.is_tensor(value) else tf.convert_to_tensor(value)

    return convert(spec, data)
