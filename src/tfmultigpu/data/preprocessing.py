"""Preprocessing of the rows that a process holds, each with a seed that its place decides."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfmultigpu.arguments import check_callable
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.passes import SharedNumber
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Batches, Function, Scalar, Shard, Tensor

_Place: TypeAlias = tuple[Scalar, Scalar]  # The number of the pass, of the first row of a batch.


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A function of an example, applied in parallel to the rows of this process, in order.

    Attributes:
        function: ``f(example)`` or ``f(example, seed)``.
        seed: The seed of the run.
        passes: The number of the current pass, read with its first batch.
    """

    function: Function
    seed: int
    passes: SharedNumber = dataclasses.field(default_factory=SharedNumber)

    def begin_pass(self) -> Any:
        """Begins the next pass; returns the operation, in a graph."""
        return self.passes.write(self.passes.read() + 1)

    def own_rows(
        self, batches: Batches, shares: Sequence[int], local: Sequence[int], skip: int
    ) -> Batches:
        """Returns the rows of each batch, a number, and the rows of this process, preprocessed."""
        has_seed = takes_seed(self.function)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def own(state: _Place, batch: Shard) -> tuple[_Place, tuple[Tensor, ...]]:
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

        # AutoGraph converts these two, for the function of the user.
        def apply(seed: Scalar, example: Tensor) -> Shard:
            if has_seed:
                return self.function(example, seed)
            return self.function(example)

        def preprocess(*part: Tensor) -> Batches:
            rows, seeds, batch = part
            examples = tf.data.Dataset.from_tensor_slices((seeds, batch))
            results = examples.map(apply, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            batch = results.batch(tf.shape(seeds, tf.int64)[0])
            return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(rows), batch))

        begin = tf.constant(-1, tf.int64), tf.constant(0, tf.int64)
        parts = batches.scan(begin, own).skip(skip)
        # Two batches at a time: threads begin with the next one before the last row is ready.
        return parts.interleave(preprocess, 2, num_parallel_calls=2, deterministic=True)


def own_range(offsets: Tensor, local: Sequence[int]) -> tuple[Scalar, Scalar]:
    """Returns the first row of a process in a global batch, and the row after its last."""
    return offsets[local[0]], partition.shard_bounds(offsets, local[-1])[1]


def divide_own_rows(
    rows: Scalar, batch: Shard, shares: Sequence[int], local: Sequence[int]
) -> tuple[list[Shard], Tensor]:
    """Returns the shards of the replicas of this process, and the offsets of all shards."""
    offsets = partition.shard_offsets(rows, shares)
    first, _ = own_range(offsets, local)
    shards = []
    for shard in local:
        start, stop = partition.shard_bounds(offsets, shard)
        shards.append(partition.slice_rows(batch, start - first, stop - first))
    return shards, offsets


def takes_seed(function: Function) -> bool:
    """Returns whether a function of an example takes a seed too."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # Functions written in C have no signature.
        return False
    return "seed" in "".join(names[1:2])


def check_preprocess(function: Function) -> None:
    """Checks that a function can be called with an example, and a seed if it names one."""
    arguments = ["example"]
    if callable(function) and takes_seed(function):
        arguments.append("seed")
    write = "def preprocess(example), and x, y = example in it if examples are pairs."
    check_callable("preprocess", function, *arguments, write=write)


def draw_seed(strategy: tf.distribute.Strategy) -> int:
    """Draws a seed that ``keras.utils.set_random_seed`` decides; all workers must call it.

    Draws it from TensorFlow's global seed, as Keras does to shuffle. From ``random`` Keras draws
    the initial weights: a model that is created afterwards would begin with other ones.
    """
    with tf.device("CPU:0"):
        own = int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32))
    return int(WorkerExchange(strategy)("the seed of the data", [own])[0, 0])
