"""How a step takes a batch: whole or already cut, to one shard per local replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.errors import DataError, LossError, ScopeError, StrategyUnavailableError
from tfmultigpu.losses import OTHER_ROWS
from tfmultigpu.traces import Traces, any_rows

__all__ = ["BatchFunction", "ShardSource", "Shards", "explaining_failures", "per_replica"]


class Shards(NamedTuple):
    """A global batch as this process sees it.

    Attributes:
        local: One structure of tensors for each replica of this process, none with zero rows.
        global_rows: Rows of the global batch, an int64 scalar.
        shares: Relative size of each replica's shard; None where something else cut the batch.
        starts: Then the number of each replica's first row, an int64 vector.
    """

    local: list[Any]
    global_rows: Any
    shares: tuple[int, ...] | None
    starts: Any = None

    def first_row(self, replica: Any) -> Any:
        """Returns the number, in the global batch, of a replica's first row: an int64 scalar.

        Args:
            replica: Number of the replica among all, an integer scalar.
        """
        if self.shares is None:
            return self.starts[replica]
        parts = len(self.shares)
        offsets = rows_lib.row_offsets(tf.maximum(self.global_rows, parts), self.shares)
        # A batch of fewer rows is whole on each.
        return tf.where(self.global_rows < parts, tf.zeros([], tf.int64), offsets[replica])


@runtime_checkable
class ShardSource(Protocol):
    """An iterator that a step can drive from inside a ``tf.function``."""

    source: Any
    strategy: tf.distribute.Strategy
    batch_spec: Any
    split_key: Any

    def split(self, element: Any) -> tuple[list[Any], Any, tuple[int, ...]]:
        """Returns what ``source`` yields as local shards, and the global rows and shares."""


class BatchFunction:
    """A function of shards, compiled once per kind of batch whatever the number of rows.

    Called with a batch, it works out whether that is a whole global batch or one already cut, and
    runs ``function(shards)`` as a ``tf.function`` with the number of rows left open. Inside another
    ``tf.function`` it runs as part of that.

    Attributes:
        function: From ``Shards`` to a nested structure of tensors.
        strategy: The strategy the shards are for.
    """

    def __init__(
        self,
        function: Callable[[Shards], Any],
        strategy: tf.distribute.Strategy,
        local: tuple[int, ...],
    ) -> None:
        """Takes the function, the strategy and the numbers of the replicas of this process."""
        self.function = function
        self.strategy = strategy
        self._local = local
        self._whole = Traces(lambda batches, _: self.function(self.cut(batches[0])))
        self._cut: dict[tuple[int, ...] | None, Traces] = {}

    def __call__(self, batch: Any) -> Any:
        """Runs the function on a batch.

        Raises:
            DataError: The batch is not data, has no rows, differs in rows, or was cut by something
                else than this library inside a ``tf.function``.
        """
        check_called_from(self.strategy)
        leaves = tf.nest.flatten(batch)
        if all(leaf is None for leaf in leaves):
            rows_lib.first_tensor(batch)
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            return self._run_cut(batch, leaves)
        return self._run_whole(batch, leaves)

    def spec_of(self, batch: Any) -> Any:
        """Returns the type specs of a batch, with its number of rows left open."""

        def spec(leaf: Any) -> Any:
            if isinstance(leaf, tf.distribute.DistributedValues):
                leaf = self._local_parts(leaf)[0]
            return any_rows(_as_tensor(leaf))

        return tf.nest.map_structure(spec, batch)

    def cut(self, batch: Any) -> Shards:
        """Returns a whole global batch as shards of equal size."""
        batch = tf.nest.map_structure(_as_tensor, batch)
        with tf.control_dependencies(rows_lib.check_rows_agree(batch)):
            rows = tf.identity(rows_lib.count_rows(batch))
        shares = (1,) * self.strategy.num_replicas_in_sync
        with tf.control_dependencies([rows]):
            return Shards(rows_lib.cut_rows(batch, shares, self._local), rows, shares)

    def _run_whole(self, batch: Any, leaves: list[Any]) -> Any:
        if tf.inside_function():
            return self.function(self.cut(batch))
        return self._run(self._whole, batch, [[_as_tensor(leaf) for leaf in leaves]], [])

    def _run_cut(self, batch: Any, leaves: list[Any]) -> Any:
        nothing = [None] * len(self._local)
        parts = [nothing if leaf is None else self._local_parts(leaf) for leaf in leaves]
        local = [list(shard) for shard in zip(*parts, strict=True)]
        cut = rows_lib.marked_cut(batch)
        rows, shares = (self._foreign_ends(local), None) if cut is None else cut
        if tf.inside_function():
            shards = [tf.nest.pack_sequence_as(batch, shard) for shard in local]
            return self.function(Shards(shards, rows, shares))
        return self._run(self._traces_of(shares), batch, local, [rows])

    def _traces_of(self, shares: tuple[int, ...] | None) -> Traces:
        """The compiled functions for batches cut by these shares, which they hold as constants."""
        if shares not in self._cut:

            def known(shards: list[Any], rows: list[Any]) -> Any:
                return self.function(Shards(shards, rows[0], shares))

            def foreign(shards: list[Any], ends: list[Any]) -> Any:
                return self.function(Shards(shards, ends[0][-1], None, ends[0][:-1]))

            self._cut[shares] = Traces(foreign if shares is None else known)
        return self._cut[shares]

    def _local_parts(self, leaf: Any) -> Any:
        parts = self.strategy.experimental_local_results(leaf)
        if len(parts) != len(self._local) or parts[0] is leaf:
            raise DataError(
                "The batch was distributed for another strategy than the step was made for, which "
                f"is {type(self.strategy).__name__} with {self.strategy.num_replicas_in_sync} "
                f"replica(s). Received: {type(leaf).__name__}. Give distribute_dataset and the "
                "step the same strategy: make_train_step(..., strategy)."
            )
        return parts

    def _foreign_ends(self, local: list[Any]) -> Any:
        """Where the shards of a batch end that something else cut: each row once, in order.

        The first end is 0, the last is the rows of the batch.
        """
        if tf.inside_function():
            raise DataError(
                "This batch does not know how many rows its global batch has: that is lost when a "
                "batch is passed into a tf.function of your own. Call step(batch) outside it, "
                "or pass the iterator in and call step(next(iterator)), or use "
                "step.run(iterator, steps)."
            )
        counts = [int(rows_lib.count_rows(shard)) for shard in local]
        if 0 in counts:
            raise DataError(
                f"Replica {counts.index(0)} got no rows. Received: shards of {counts} rows. Cut "
                "the data with tmg.distribute_dataset, which never leaves a replica empty."
            )
        everywhere = [0] * self.strategy.num_replicas_in_sync
        for replica, count in zip(self._local, counts, strict=True):
            everywhere[replica] = count
        if len(local) == len(everywhere):
            return tf.constant([0, *itertools.accumulate(everywhere)], tf.int64)
        summed = self.strategy.run(
            lambda n: tf.distribute.get_replica_context().all_reduce("SUM", n),
            args=(tf.constant(everywhere, tf.int64),),
        )
        rows = self.strategy.experimental_local_results(summed)[0] // len(local)
        return tf.pad(tf.cumsum(rows), [[1, 0]])

    def _run(self, traces: Traces, batch: Any, copies: list[list[Any]], further: list[Any]) -> Any:
        with explaining_failures():
            return traces(batch, copies, further)


def per_replica(strategy: tf.distribute.Strategy, values: list[Any]) -> Any:
    """Returns one value per local replica as what ``strategy.run`` hands to each its own of."""
    if strategy.num_replicas_in_sync == 1:
        return values[0]
    turn = iter(values)
    return strategy.experimental_distribute_values_from_function(lambda _: next(turn))


def check_called_from(strategy: tf.distribute.Strategy) -> None:
    """Checks that a step is called once for all replicas, and not under another strategy.

    Raises:
        ScopeError: It is called inside ``strategy.run``, or in the scope of another strategy.
    """
    if not tf.distribute.has_strategy():
        return
    if tf.distribute.get_replica_context() is not None:
        raise ScopeError(
            "A step runs on all replicas by itself, so calling it in each of them would do "
            "everything several times. Call step(batch) beside strategy.run, not in the function "
            "given to it."
        )
    current = tf.distribute.get_strategy()
    if current is not strategy:
        raise ScopeError(
            "The step is called in the scope of another strategy. Received: "
            f"{type(current).__name__} with {current.num_replicas_in_sync} replica(s), and the "
            f"step was made for {type(strategy).__name__} with {strategy.num_replicas_in_sync}. "
            "Call it outside every scope."
        )


@contextmanager
def explaining_failures() -> Iterator[None]:
    """Raises what an error of TensorFlow means for the user, where it does not speak for itself."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.InternalError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from error


def _explain(error: Any) -> Exception | None:
    if isinstance(error, tf.errors.InvalidArgumentError):
        if OTHER_ROWS in error.message:
            return LossError(OTHER_ROWS)
        explained = rows_lib.as_data_error(error)
        return None if explained is error else explained
    if "is joining a group" in error.message:
        return StrategyUnavailableError(
            "This is the second strategy in this process whose replicas talk by TensorFlow's "
            "collectives, on other devices than the first, which TensorFlow refuses until the "
            "process restarts (a default tf.distribute.MirroredStrategy does so on CPUs). Restart, "
            "and make the strategies with tmg.create_strategy(devices=...), which avoids that."
        )
    return None


def _as_tensor(value: Any) -> Any:
    if value is None or (tf.is_tensor(value) and value.shape.rank != 0):
        return value
    if (
        not tf.is_tensor(value)
        and not hasattr(value, "__array__")
        and not isinstance(value, (int, float))
    ):
        raise DataError(
            f"A batch is a tensor or a tuple or dict of tensors. Received: {type(value).__name__} "
            "inside it. Give one element of tmg.distribute_dataset(dataset)."
        )
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(np.asarray(value))
    if tensor.shape.rank == 0:
        raise DataError(
            f"A batch has rows, but a part of this one is a single number. Received: {value!r}. "
            "Give a batch of examples: dataset.batch(global_batch_size)."
        )
    return tensor
