"""Preprocessing of the rows that a process holds, each with a seed that its place decides."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import count_rows
from tfmultigpu.data.consistency import cluster_to_compare, compared_over_workers
from tfmultigpu.data.examples import Examples, mark_of
from tfmultigpu.errors import DataError

# The key of a window holds the number of its batch, and in the lower bits its number of rows.
_ROW_BITS = 32


class PassNumber:
    """Number of the current pass over a dataset; ``tf.data`` reads it with its first batch."""

    def __init__(self) -> None:
        """Begins before the first pass."""
        # Unlike a variable, a table is the same object inside and outside the scope of a strategy.
        self._table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def begin_next(self) -> Any:
        """Begins the next pass; returns the operation, in a graph."""
        return self._table.insert(tf.constant(0, tf.int64), self.read() + 1)

    def read(self) -> Any:
        """Returns the number, an int64 scalar; -1 before the first pass."""
        return self._table.lookup(tf.constant(0, tf.int64))


class Place(NamedTuple):
    """Place of a batch: the number of the pass, and of its first row in it, int64 scalars."""

    pass_number: Any
    first_row: Any


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
        examples: The source of the examples.
        passes: Counts passes.
    """

    function: Callable[..., Any]
    seed: int
    examples: Examples
    passes: PassNumber = dataclasses.field(default_factory=PassNumber)

    def compared(
        self, batches: tf.data.Dataset[Any], strategy: tf.distribute.Strategy
    ) -> tf.data.Dataset[Any]:
        """Returns the dataset with a check that all workers read the same examples.

        Of examples that are read by number, batches show only the numbers: some are compared too.
        """
        read, rows = self.examples.read, self.examples.rows
        if read is None or rows is None or cluster_to_compare(strategy) is None:
            return compared_over_workers(batches, strategy)
        mark = tf.constant(mark_of(read, rows), tf.int64)
        marked = batches.map(lambda numbers: (numbers, mark))
        return compared_over_workers(marked, strategy).map(lambda numbers, _: numbers)

    def own_rows(
        self, batches: tf.data.Dataset[Any], shares: Sequence[int], local: Sequence[int], skip: int
    ) -> tf.data.Dataset[Any]:
        """Returns the preprocessed rows of this process of each batch: a dataset of ``OwnRows``."""
        read, has_seed = self.examples.read, takes_seed(self.function)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def own(place: Place, batch: Any) -> tuple[Any, Any, Any]:
            rows = count_rows(batch)
            start, stop = own_range(partition.shard_offsets(rows, shares), local)
            numbers = tf.range(place.first_row + start, place.first_row + stop)
            key = tf.stack([tf.constant(self.seed, tf.int64), place.pass_number])
            draw: Any = tf.random.stateless_uniform
            mixed = draw([], key, minval=None, maxval=None, dtype=tf.int64)
            seeds = tf.stack([tf.fill(tf.shape(numbers), mixed), numbers], 1)
            return rows, seeds, partition.slice_rows(batch, start, stop)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def rows_of(number: Any, part: Any) -> tf.data.Dataset[Any]:
            rows, seeds, batch = part
            count = tf.shape(seeds, tf.int64)[0]
            key = tf.bitwise.left_shift(number, tf.constant(_ROW_BITS, tf.int64)) + count
            beside = tf.fill([count], key), tf.fill([count], rows), seeds
            return tf.data.Dataset.from_tensor_slices((*beside, batch))

        def apply(key: Any, rows: Any, seed: Any, example: Any) -> Any:  # AutoGraph converts it.
            example = example if read is None else read(example)
            return key, rows, self.function(example, seed) if has_seed else self.function(example)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def size_of(key: Any) -> Any:
            return tf.bitwise.bitwise_and(key, tf.constant(2**_ROW_BITS - 1, tf.int64))

        rows = self._placed(batches).skip(skip).map(own).enumerate().flat_map(rows_of)
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

    def _placed(self, batches: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Returns the batches, each beside its ``Place``."""

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def count(state: Any, batch: Any) -> Any:
            number, first_row = state
            number = tf.where(number < 0, self.passes.read(), number)
            rows = count_rows(batch)
            return (number, first_row + rows), (Place(number, first_row), batch)

        return batches.scan((tf.constant(-1, tf.int64), tf.constant(0, tf.int64)), count)


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
    wrong = "preprocess must be a function f(example) or f(example, seed). Received: "
    if not callable(function):
        raise DataError(f"{wrong}preprocess={function!r}. Write preprocess=f.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Functions written in C have no signature.
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in signature.parameters.values() if one.kind in kinds]
    # A second argument of another name is a part of the example, as in the map of tf.data.
    has_seed = "seed" in "".join(names[1:2])
    try:
        signature.bind(*(["example", "seed"] if has_seed else ["example"]))
        is_right = "seed" not in "".join(names[:1])
    except TypeError:
        is_right = False
    if not is_right:
        raise DataError(
            f"{wrong}one with the signature {signature}. An example of several parts is a tuple: "
            "def f(example): image, label = example."
        )
    return has_seed
