"""Pass after pass over arrays, in an order that a seed and the number of the pass decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import any_rows, count_rows, structure_of
from tfmultigpu.data.cut import Cut
from tfmultigpu.data.partition import slice_rows, take_rows
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.data.sources import untuned


def shard_arrays(
    arrays: Any,
    batch_size: int,
    strategy: tf.distribute.Strategy,
    keep: Callable[[Any, Callable[[], Any]], Any],
    *,
    shuffle: bool = False,
    seed: int = 0,
    first_batch: int = 0,
    shares: Sequence[float] | None = None,
) -> ShardedDataset:
    """Returns the global batches of arrays with rows, without end, as shards for the replicas."""
    whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)
    specs = tf.nest.map_structure(any_rows, arrays)

    def pipeline(arrays: Any, seed: Any, first_batch: Any) -> Any:
        passes = functools.partial(_passes, arrays, batch_size, shuffle, seed, first_batch)
        uncut = passes(None)
        cut = Cut(strategy, whole_shares, uncut.element_spec)
        return uncut, passes(cut.function) if cut.is_needed else uncut

    def trace() -> Any:
        scalar = tf.TensorSpec([], tf.int64)
        # Made once: TensorFlow would warn of a trace for each model.
        return tf.function(pipeline, autograph=False).get_concrete_function(specs, scalar, scalar)

    traced = keep((strategy, whole_shares, structure_of(arrays), specs, batch_size, shuffle), trace)
    with tf.device("CPU:0"):  # An iterator is made where its dataset is: on a GPU all maps fail.
        batches, elements = traced(arrays, seed, first_batch)
    return ShardedDataset(batches, strategy, whole_shares, elements=elements)


def _passes(
    arrays: Any, batch_size: int, shuffle: bool, seed: Any, first_batch: Any,
    finish: Callable[..., Any] | None,
) -> tf.data.Dataset[Any]:  # fmt: skip
    rows = tf.cast(count_rows(arrays), tf.int64)
    per_pass = -(-rows // batch_size)
    numbers = untuned(tf.data.Dataset.counter(first_batch))

    # One function makes the batch and finishes it: TensorFlow takes milliseconds to prepare each
    # for a new iterator.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch_of(place: Any) -> Any:
        if shuffle:
            batch = tf.nest.map_structure(lambda leaf: take_rows(leaf, place), arrays)
        else:
            start = place % per_pass * batch_size
            batch = slice_rows(arrays, start, start + batch_size)
        if finish is None:
            return batch
        return finish(*batch) if type(batch) is tuple else finish(batch)  # As in tf.data.

    if not shuffle:
        return numbers.map(batch_of)
    shuffled: Any = tf.random

    def choose(state: Any, number: Any) -> Any:
        drawn_for, order = state
        order = tf.cond(
            number // per_pass == drawn_for,
            lambda: order,
            lambda: shuffled.experimental.stateless_shuffle(
                tf.range(rows), seed=tf.stack([seed, number // per_pass])
            ),
        )
        start = number % per_pass * batch_size
        return (number // per_pass, order), order[start : start + batch_size]

    # No flat_map: TensorFlow optimizes a function inside a function twice for each iterator.
    chosen = numbers.scan((tf.constant(-1, tf.int64), tf.zeros([rows], tf.int64)), choose)
    return chosen.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
