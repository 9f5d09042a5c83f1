"""Preprocessing of the rows that a process holds, each with a seed that its place decides."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import (
    PREPROCESSED_ROWS,
    check_rows_agree,
    count_rows,
    with_dependencies,
)
from tfmultigpu.data.consistency import cluster_to_compare, compared_over_workers
from tfmultigpu.data.examples import Examples, mark_of
from tfmultigpu.errors import DataError

__all__ = [
    "OwnRows",
    "PassNumber",
    "Place",
    "Preprocessing",
    "divide_own_rows",
    "own_range",
    "takes_seed",
]

# The key of a window holds the number of its batch, and in the lower bits its number of rows.
_ROW_BITS = 32


class PassNumber:
    """Number of the current pass over a dataset, from 0 on.

    ``tf.data`` reads it together with the first batch of a pass.
    """

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
    """Place of a batch in the passes over a dataset, int64 scalars.

    Attributes:
        pass_number: The number of the pass.
        first_row: The number of its first row in the pass.
    """

    pass_number: Any
    first_row: Any


class OwnRows(NamedTuple):
    """Rows of a global batch that the replicas of this process hold.

    Attributes:
        global_rows: Rows of the global batch, an int64 scalar.
        batch: A nested structure of tensors: the own rows alone.
    """

    global_rows: Any
    batch: Any


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """A function of an example, applied in parallel to the rows of this process, in order.

    Attributes:
        function: ``f(example)`` or ``f(example, seed)``; if ``batched``, of many examples and a
            seed for each.
        batched: Whether the function takes many examples at once.
        seed: The seed of the run.
        examples: The source of the examples.
        passes: Counts passes.
    """

    function: Callable[..., Any]
    batched: bool
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
        """Returns the rows of this process of each batch, preprocessed: a dataset of ``OwnRows``.

        Args:
            batches: Global batches of examples, or of their numbers.
            shares: Relative share of each replica, integers.
            local: The replicas of this process.
            skip: Batches at the beginning to leave out.
        """

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def own(place: Place, batch: Any) -> tuple[Any, Any, Any]:
            rows = count_rows(batch)
            start, stop = own_range(rows, shares, local)
            numbers = tf.range(place.first_row + start, place.first_row + stop)
            key = tf.stack([tf.constant(self.seed, tf.int64), place.pass_number])
            draw: Any = tf.random.stateless_uniform
            mixed = draw([], key, minval=None, maxval=None, dtype=tf.int64)
            seeds = tf.stack([tf.fill(tf.shape(numbers), mixed), numbers], 1)
            return rows, seeds, partition.slice_rows(batch, start, stop)

        parts = self._placed(batches).skip(skip).map(own)
        read = self.examples.read
        if self.batched and (read is None or self.examples.reads_many):
            return self._of_many(parts, read)
        if self.batched:
            return self._of_many(self._of_each(parts, lambda example, seed: example), None)
        return self._finished(self._of_each(parts, self._call))

    def _call(self, examples: Any, seeds: Any) -> Any:
        return (
            self.function(examples, seeds) if takes_seed(self.function) else self.function(examples)
        )

    def _placed(self, batches: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Returns the batches, each beside its ``Place``."""

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def count(state: Any, batch: Any) -> Any:
            number, first_row = state
            number = tf.where(number < 0, self.passes.read(), number)
            rows = count_rows(batch)
            return (number, first_row + rows), (Place(number, first_row), batch)

        return batches.scan((tf.constant(-1, tf.int64), tf.constant(0, tf.int64)), count)

    def _of_each(
        self, parts: tf.data.Dataset[Any], function: Callable[[Any, Any], Any]
    ) -> tf.data.Dataset[Any]:
        """Applies a function to each row; returns rows of the global batch, seeds and results."""
        read = self.examples.read

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def rows_of(number: Any, part: Any) -> tf.data.Dataset[Any]:
            rows, seeds, batch = part
            count = tf.shape(seeds, tf.int64)[0]
            key = tf.bitwise.left_shift(number, tf.constant(_ROW_BITS, tf.int64)) + count
            beside = tf.fill([count], key), tf.fill([count], rows), seeds
            return tf.data.Dataset.from_tensor_slices((*beside, batch))

        def apply(key: Any, rows: Any, seed: Any, example: Any) -> Any:  # AutoGraph converts it.
            example = example if read is None else read(example)
            return key, rows, seed, function(example, seed)

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def size_of(key: Any) -> Any:
            return tf.bitwise.bitwise_and(key, tf.constant(2**_ROW_BITS - 1, tf.int64))

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def without_key(key: Any, rows: Any, seeds: Any, results: Any) -> Any:
            return rows[0], seeds, results

        rows = parts.enumerate().flat_map(rows_of)
        rows = rows.map(apply, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        # Rows come in order, so one window is filled after the other.
        windows = rows.group_by_window(
            lambda key, *rest: key,
            lambda key, window: window.batch(size_of(key)),
            window_size_func=size_of,
        )
        return windows.map(without_key)

    def _of_many(
        self, parts: tf.data.Dataset[Any], read: Callable[[Any], Any] | None
    ) -> tf.data.Dataset[Any]:
        """Applies the function to all own rows of a batch at once."""

        def apply(rows: Any, seeds: Any, examples: Any) -> Any:  # AutoGraph converts it.
            examples = examples if read is None else read(examples)
            return rows, seeds, self._call(examples, seeds)

        return self._finished(
            parts.map(apply, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        )

    def _finished(self, parts: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def finish(rows: Any, seeds: Any, batch: Any) -> OwnRows:
            count = tf.shape(seeds, tf.int64)[0]
            found = count_rows(batch)
            rows_in_and_out = tf.cast(tf.stack([count, found]), tf.int32)
            check = tf.debugging.Assert(found == count, [PREPROCESSED_ROWS, rows_in_and_out])
            batch = with_dependencies([check, *check_rows_agree(batch)], batch)
            return OwnRows(rows, batch)

        return parts.map(finish)


def own_range(rows: Any, shares: Sequence[int], local: Sequence[int]) -> tuple[Any, Any]:
    """Returns the first row of a process in a global batch, and the row after its last."""
    offsets = partition.shard_offsets(rows, shares)
    return offsets[local[0]], tf.where(rows < len(shares), rows, offsets[local[-1] + 1])


def divide_own_rows(own: OwnRows, shares: Sequence[int], local: Sequence[int]) -> tuple[Any, Any]:
    """Returns the shards of the replicas of this process, and the offsets of all shards."""
    rows, batch = own
    offsets = partition.shard_offsets(rows, shares)
    start, _ = own_range(rows, shares, local)
    stops = tf.where(rows < len(shares), rows, offsets[1:])
    shards = [partition.slice_rows(batch, offsets[i] - start, stops[i] - start) for i in local]
    return shards, offsets


def takes_seed(function: Callable[..., Any]) -> bool:
    """Returns whether a function of an example takes a seed too.

    Raises:
        DataError: It is not a function, or takes other arguments.
    """
    if not callable(function):
        raise DataError(
            "preprocess must be a function f(example) or f(example, seed). Received: "
            f"preprocess={function!r}. Write preprocess=f."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Functions written in C have no signature.
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [one for one in parameters if one.kind in places]
    needed = [one.name for one in given if one.default is one.empty]
    names = [one.name for one in given]
    by_name = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    # A second argument of another name is a part of the example, as in the map of tf.data.
    if (
        len(needed) > 2
        or (len(needed) == 2 and ("seed" not in needed[1] or "seed" in needed[0]))
        or any(one.default is one.empty for one in by_name)
        or (not given and not any(one.kind is one.VAR_POSITIONAL for one in parameters))
    ):
        raise DataError(
            "preprocess must be a function f(example) or f(example, seed). Received: one with the "
            f"arguments {[*names, *(one.name for one in by_name)]}. An example of several parts is "
            "a tuple: def f(example): image, label = example."
        )
    return any("seed" in name for name in names[1:2])
