"""Pass after pass over arrays, in an order that a seed and the number of the pass decide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmultigpu.data.batch_format import any_rows, count_rows, structure_of
from tfmultigpu.data.cut import Cut
from tfmultigpu.data.partition import slice_rows, take_rows
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.data.sources import untuned
from tfmultigpu.types import Batches, Nested, Scalar, Shard

_Cut: TypeAlias = Callable[..., Shard] | None
_Keep: TypeAlias = Callable[[object, Callable[[], Nested]], Nested]


def shard_arrays(
    arrays: Any,
    batch_size: int,
    strategy: tf.distribute.Strategy,
    keep: _Keep,
    *,
    shuffle: bool = False,
    seed: int = 0,
    first_batch: int = 0,
    shares: Sequence[float] | None = None,
) -> ShardedDataset:
    """Returns the global batches of arrays with rows, without end, as shards for the replicas.

    Args:
        arrays: Tensors with equally many rows, in any structure.
        batch_size: The rows of a global batch.
        strategy: The strategy.
        keep: Returns what was made last for a key, or makes it by the function it is given.
        shuffle: Whether to order the rows of each pass anew.
        seed: Decides about their order, with the number of the pass.
        first_batch: The number of the first batch, counted over all passes.
        shares: Relative share of each replica; None for equal ones.
    """
    whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)
    specs = tf.nest.map_structure(any_rows, arrays)

    def pipeline(arrays: Any, seed: Scalar, first_batch: Scalar) -> tuple[Batches, Batches]:
        """Returns the batches, and the same cut."""
        if shuffle:
            passes = functools.partial(_shuffled, arrays, batch_size, seed, first_batch)
        else:
            passes = functools.partial(_in_order, arrays, batch_size, first_batch)
        uncut = passes(None)
        cut = Cut(strategy, whole_shares, uncut.element_spec)
        if not cut.is_needed:
            return uncut, uncut
        return uncut, passes(cut.cut)

    def trace() -> Nested:
        scalar = tf.TensorSpec([], tf.int64)
        # Made once: TensorFlow would warn of a trace for each model.
        return tf.function(pipeline, autograph=False).get_concrete_function(specs, scalar, scalar)

    traced = keep((strategy, whole_shares, structure_of(arrays), specs, batch_size, shuffle), trace)
    with tf.device("CPU:0"):  # An iterator is made where its dataset is: on a GPU all maps fail.
        batches, elements = traced(arrays, seed, first_batch)
    return ShardedDataset(batches, strategy, whole_shares, elements=elements)


# One function makes the batch and cuts it: TensorFlow takes milliseconds to prepare each for a new
# iterator.


def _in_order(arrays: Any, batch_size: int, first_batch: Scalar, cut: _Cut) -> Batches:
    """Returns pass after pass in the order of the rows."""
    per_pass = -(-_rows(arrays) // batch_size)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch_of(number: Scalar) -> Shard:
        start = number % per_pass * batch_size
        batch = slice_rows(arrays, start, start + batch_size)
        return batch if cut is None else cut(batch)

    return untuned(tf.data.Dataset.counter(first_batch)).map(batch_of)


def _shuffled(
    arrays: Any, batch_size: int, seed: Scalar, first_batch: Scalar, cut: _Cut
) -> Batches:
    """Returns pass after pass, each in an order of its own."""
    rows = _rows(arrays)
    size = tf.minimum(tf.cast(batch_size, tf.int64), rows)
    per_pass = -(-rows // size)
    random: Any = tf.random

    def order_of(number_of_pass: Scalar) -> Scalar:
        """Returns ``[per_pass, size]``: the rows of each batch of a pass, -1 after the last."""
        seed_of_pass = tf.stack([seed, number_of_pass])
        order = random.experimental.stateless_shuffle(tf.range(rows), seed=seed_of_pass)
        order = tf.pad(order, [[0, per_pass * size - rows]], constant_values=-1)
        return tf.reshape(order, [per_pass, size])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch_of(places: Scalar) -> Shard:
        places = places[: tf.math.count_nonzero(places >= 0)]
        batch = tf.nest.map_structure(lambda leaf: take_rows(leaf, places), arrays)
        return batch if cut is None else cut(batch)

    # No flat_map: TensorFlow optimizes a function inside a function twice for each iterator.
    orders = untuned(tf.data.Dataset.counter(first_batch // per_pass)).map(order_of)
    places = orders.unbatch().skip(first_batch % per_pass)
    return places.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _rows(arrays: Any) -> Scalar:
    return tf.cast(count_rows(arrays), tf.int64)
