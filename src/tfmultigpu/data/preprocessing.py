"""Preprocessing of the rows that a process holds, each with a seed that its place decides."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.passes import SharedNumber
from tfmultigpu.strategies.worker_exchange import WorkerExchange

# The key of a window holds the number of its batch, and in the lower bits its number of rows.
_ROW_BITS = 32


class OwnRows(NamedTuple):
    """The rows of a global batch that this process holds, beside how many it has in all."""

    global_rows: Any
    batch: Any


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A function of an example, applied in parallel to the rows of this process, in order.

    Attributes:
        function: ``f(example)`` or ``f(example, seed)``.
        seed: The seed of the run.
        passes: The number of the current pass, read with its first batch.
    """

    function: Callable[..., Any]
    seed: int
    passes: SharedNumber = dataclasses.field(default_factory=SharedNumber)

    def begin_pass(self) -> Any:
        """Begins the next pass; returns the operation, in a graph."""
        return self.passes.write(self.passes.read() + 1)

    def own_rows(
        self, batches: tf.data.Dataset[Any], shares: Sequence[int], local: Sequence[int], skip: int
    ) -> tf.data.Dataset[Any]:
        """Returns the preprocessed rows of this process of each batch: a dataset of ``OwnRows``."""
        has_seed = takes_seed(self.function)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def own(state: Any, batch: Any) -> Any:
            number, first_row = state
            number = tf.where(number < 0, self.passes.read(), number)
            rows = count_rows(batch)
            start, stop = own_range(partition.shard_offsets(rows, shares), local)
            places = tf.range(first_row + start, first_row + stop)
            key = tf.stack([tf.constant(self.seed, tf.int64), number])
            draw: Any = tf.random.stateless_uniform
            mixed = draw([], key, minval=None, maxval=None, dtype=tf.int64)
            seeds = tf.stack([tf.fill(tf.shape(places), mixed), places], 1)
            part = rows, seeds, partition.slice_rows(batch, start, stop)
            return (number, first_row + rows), part

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def rows_of(number: Any, part: Any) -> tf.data.Dataset[Any]:
            rows, seeds, batch = part
            count = tf.shape(seeds, tf.int64)[0]
            key = tf.bitwise.left_shift(number, tf.constant(_ROW_BITS, tf.int64)) + count
            beside = tf.fill([count], key), tf.fill([count], rows), seeds
            return tf.data.Dataset.from_tensor_slices((*beside, batch))

        def apply(key: Any, rows: Any, seed: Any, example: Any) -> Any:  # AutoGraph converts it.
            return key, rows, self.function(example, seed) if has_seed else self.function(example)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def size_of(key: Any) -> Any:
            return tf.bitwise.bitwise_and(key, tf.constant(2**_ROW_BITS - 1, tf.int64))

        begin = tf.constant(-1, tf.int64), tf.constant(0, tf.int64)
        rows = batches.scan(begin, own).skip(skip).enumerate().flat_map(rows_of)
        rows = rows.map(apply, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        # Rows come in order, so one window is filled after the other.
        windows = rows.group_by_window(
            lambda key, *rest: key,
            lambda key, window: window.batch(size_of(key)),
            window_size_func=size_of,
        )
        finish = tf.autograph.experimental.do_not_convert(
            lambda key, rows, results: OwnRows(rows[0], results)
        )
        return windows.map(finish)


def own_range(offsets: Any, local: Sequence[int]) -> tuple[Any, Any]:
    """Returns the first row of a process in a global batch, and the row after its last."""
    return offsets[local[0]], partition.shard_bounds(offsets, local[-1])[1]


def divide_own_rows(own: OwnRows, shares: Sequence[int], local: Sequence[int]) -> tuple[Any, Any]:
    """Returns the shards of the replicas of this process, and the offsets of all shards."""
    rows, batch = own
    offsets = partition.shard_offsets(rows, shares)
    first, _ = own_range(offsets, local)
    bounds = [partition.shard_bounds(offsets, shard) for shard in local]
    return [partition.slice_rows(batch, a - first, b - first) for a, b in bounds], offsets


def takes_seed(function: Callable[..., Any]) -> bool:
    """Returns whether a function of an example takes a seed too."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # Functions written in C have no signature.
        return False
    return "seed" in "".join(names[1:2])


def draw_seed(strategy: tf.distribute.Strategy) -> int:
    """Draws a seed that ``keras.utils.set_random_seed`` decides; all workers must call it.

    Draws it from TensorFlow's global seed, as Keras does to shuffle. From ``random`` Keras draws
    the initial weights: a model that is created afterwards would begin with other ones.
    """
    with tf.device("CPU:0"):
        own = int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))
    return int(WorkerExchange(strategy)("the seed of the data", [own])[0, 0])
