"""Conversion of training data to an ``EpochIterator``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.other_packages import read_tables
from tfmultigpu.data.resumable import PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.data.sources import to_dataset
from tfmultigpu.errors import DataError
from tfmultigpu.loops.class_weights import weighting
from tfmultigpu.loops.epoch_iterator import EpochIterator
from tfmultigpu.loops.inputs import check_ends, check_shards, is_arrays, length, no_batches
from tfmultigpu.strategies.worker_exchange import digest_of

__all__ = ["draw_seed", "make_epoch_iterator", "split_off"]

_SAMPLED_ROWS = 16


def draw_seed() -> int:
    """Draws the seed of the order of arrays.

    Draws it from TensorFlow's global seed, as Keras does to shuffle. From ``random`` Keras draws
    the initial weights: a model that is created after ``fit`` would begin with other ones.
    """
    with tf.device("CPU:0"):
        return int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))


def make_epoch_iterator(
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
    """Returns the batches of each epoch, and their type specs.

    Args:
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
        for name, value in (("class_weight", class_weight), ("shares", shares)):
            if value is not None:
                raise DataError(
                    f"The data is already distributed, so {name} cannot be applied. Received: "
                    f"{name}={value!r}. Give fit the dataset itself."
                )
        return _iterate(data, data, steps_per_epoch)
    if not is_arrays(data):
        batches = _weighted(to_dataset(data, batch_size), class_weight)
        return _iterate(data, distribute_dataset(batches, strategy, shares=shares), steps_per_epoch)
    data = read_tables(data)
    arrays = _tensors(data)
    rows = int(count_rows(arrays))
    if not rows:
        raise no_batches(data)
    if batch_size is None:
        batch_size = math.ceil(rows / steps_per_epoch) if steps_per_epoch else 32
    to_dataset(data, batch_size)  # Checks its arguments.
    passes = _passes(arrays, rows, int(batch_size), shuffle, (seed, first_pass))
    sharded = distribute_dataset(_weighted(passes, class_weight), strategy, shares=shares)
    description = {
        "rows": rows,
        "batch_size": int(batch_size),
        "shuffle": shuffle,
        "steps_per_epoch": steps_per_epoch,
        "mark of some rows": _fingerprint(arrays, rows),
    }
    per_pass = math.ceil(rows / batch_size)
    epoch_iterator = EpochIterator(
        sharded, per_pass, steps_per_epoch, repeats=True, description=description
    )
    return epoch_iterator, sharded.element_spec


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
    arrays = _tensors(read_tables(data))
    rows = int(count_rows(arrays))
    at = math.floor(rows * (1.0 - validation_split))
    if not 0 < at < rows:
        raise DataError(
            f"{rows} examples are too few to split. Received: validation_split="
            f"{validation_split}, which leaves {at} examples to train on. Give more data, or "
            "another fraction."
        )

    def part(start: int, stop: int) -> Any:
        return tf.nest.map_structure(
            lambda one: None if one is None else _slice(one, start, stop), arrays
        )

    return part(0, at), part(at, rows)


def _iterate(data: Any, batches: ShardedDataset, steps: int | None) -> tuple[EpochIterator, Any]:
    check_ends(data, batches, steps, "steps_per_epoch")
    return EpochIterator(batches, length(data, batches), steps), batches.element_spec


def _weighted(batches: tf.data.Dataset[Any], class_weight: Any) -> tf.data.Dataset[Any]:
    if class_weight is None:
        return batches
    return batches.map(weighting(class_weight), num_parallel_calls=tf.data.AUTOTUNE)


def _passes(
    arrays: Any, rows: int, batch_size: int, shuffle: bool, seed: tuple[int, int]
) -> tf.data.Dataset[Any]:
    """Returns infinite passes over arrays; the order depends only on seed and pass number."""
    present = tuple(leaf for leaf in tf.nest.flatten(arrays) if leaf is not None)
    starts = tf.data.Dataset.range(0, rows, batch_size)
    global_seed, first = seed
    has_sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in present)

    def filled(tensors: Sequence[Any]) -> Any:
        turn = iter(tensors)
        leaves = [None if leaf is None else next(turn) for leaf in tf.nest.flatten(arrays)]
        return tf.nest.pack_sequence_as(arrays, leaves)

    def one_pass(number: Any) -> tf.data.Dataset[Any]:
        if shuffle and has_sparse:  # tf.gather does not accept sparse tensors.
            slices = tf.data.Dataset.from_tensor_slices(present)
            mixed = slices.shuffle(rows, seed=global_seed + number)
            return mixed.batch(batch_size).map(lambda *tensors: filled(tensors))
        if not shuffle:
            return starts.map(
                lambda start: filled([_slice(one, start, start + batch_size) for one in present])
            )
        shuffled: Any = tf.random
        order = shuffled.experimental.stateless_shuffle(
            tf.range(rows, dtype=tf.int64), seed=tf.stack([global_seed, number])
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


def _fingerprint(arrays: Any, rows: int) -> int:
    """Returns a digest of some rows of arrays and of their types."""
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
    """Converts arrays to tensors in the structure of the batches."""
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
