"""Conversion of a batch, whole or already cut, to one shard per local replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows, check_rows_agree, count_rows, first_tensor
from tfmultigpu.errors import (
    DataError,
    ScopeError,
)
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.traces import Traces

__all__ = [
    "BatchFunction",
    "ShardSource",
    "Shards",
    "as_tensor",
]


class Shards(NamedTuple):
    """A global batch as this process sees it.

    Attributes:
        local: One structure of tensors for each replica of this process, none with zero rows.
        offsets: Where the shard of each replica, of all processes, begins in the global batch,
            then the rows of that: an int64 vector; see ``partition.batch_offsets``.
    """

    local: list[Any]
    offsets: Any

    @property
    def global_rows(self) -> Any:
        """Rows of the global batch, an int64 scalar."""
        return self.offsets[-1]

    @property
    def largest(self) -> Any:
        """Rows of the largest shard, an int64 scalar."""
        return tf.reduce_max(self.offsets[1:] - self.offsets[:-1])

    def first_row(self, replica: Any) -> Any:
        """Returns the number, in the global batch, of a replica's first row: an int64 scalar.

        Args:
            replica: Number of the replica among all, an integer scalar.
        """
        return self.offsets[replica]

    def with_open_rows(self) -> Shards:
        """Returns these with the number of rows of each tensor unknown while a step is traced.

        It can be known where a dataset drops its last batch, and random draws are told to be by row
        by its being open.
        """
        return self._replace(local=tf.nest.map_structure(_open_rows, self.local))


@runtime_checkable
class ShardSource(Protocol):
    """An iterator that a step can drive from inside a ``tf.function``."""

    source: Any
    strategy: tf.distribute.Strategy
    batch_spec: Any
    split_key: Any

    def split(self, element: Any) -> tuple[list[Any], Any]:
        """Returns what ``source`` yields as local shards, and their offsets."""

    def only(self, element: Any) -> ShardSource:
        """Returns an iterator of the same kind that yields one element of ``source`` only."""


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
        several = strategy.num_replicas_in_sync > 1
        self.function = (lambda s: function(s.with_open_rows())) if several else function
        self.strategy = strategy
        self._local = local
        self._whole = Traces(
            lambda batches, _: self.function(self.cut(batches[0])), keep_rows=_keeps_rows(strategy)
        )
        self._cut = Traces(lambda shards, offsets: self.function(Shards(shards, offsets[0])))

    def __call__(self, batch: Any) -> Any:
        """Runs the function on a batch.

        Raises:
            DataError: The batch is not data, has no rows, differs in rows, or was cut by something
                else than this library inside a ``tf.function``.
        """
        check_called_from(self.strategy)
        leaves = tf.nest.flatten(batch)
        if all(leaf is None for leaf in leaves):
            first_tensor(batch)
        if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            return self._run_cut(batch, leaves)
        return self._run_whole(batch, leaves)

    def spec_of(self, batch: Any) -> Any:
        """Returns the type specs of a batch, with its number of rows left open."""

        def first(leaf: Any) -> Any:
            distributed = isinstance(leaf, tf.distribute.DistributedValues)
            return self._local_parts(leaf)[0] if distributed else leaf

        shard = as_tensors(tf.nest.map_structure(first, batch))
        return tf.nest.map_structure(any_rows, shard)

    def cut(self, batch: Any) -> Shards:
        """Returns a whole global batch as shards of equal size."""
        batch = as_tensors(batch)
        shares = (1,) * self.strategy.num_replicas_in_sync
        # Where batches come from: a GPU would be given the shards of all, to cut them.
        with tf.device("CPU:0"):
            with tf.control_dependencies(check_rows_agree(batch)):
                offsets = tf.identity(partition.batch_offsets(batch, shares))
            with tf.control_dependencies([offsets]):
                return Shards(partition.cut_rows(batch, shares, self._local), offsets)

    def known_rows(self, batch: Any) -> int | None:
        """Returns the rows of a global batch, None if nobody has said how many they are."""
        rows = partition.marked_global_rows(batch)
        if rows is not None:
            return int(rows)
        shapes = (getattr(leaf, "shape", None) for leaf in tf.nest.flatten(batch))
        return next((int(shape[0]) for shape in shapes if shape and shape[0] is not None), None)

    def on_shards(self, shards: Shards) -> Any:
        """Runs the function on shards, outside of a ``tf.function``."""
        local = [tf.nest.flatten(shard) for shard in shards.local]
        return self._run(self._cut, shards.local[0], local, [shards.offsets])

    def shards(self, batch: Any) -> Shards:
        """Returns a batch, whole or already cut, as shards; outside of a ``tf.function``."""
        leaves = tf.nest.flatten(batch)
        if not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            with explaining_failures(self.strategy):
                return self.cut(batch)
        local, offsets = self._cut_before(batch, leaves)
        return Shards([tf.nest.pack_sequence_as(batch, shard) for shard in local], offsets)

    def _run_whole(self, batch: Any, leaves: list[Any]) -> Any:
        if tf.inside_function():
            return self.function(self.cut(batch))
        return self._run(self._whole, batch, [_tensors(batch, leaves)], [])

    def _run_cut(self, batch: Any, leaves: list[Any]) -> Any:
        local, offsets = self._cut_before(batch, leaves)
        if tf.inside_function():
            shards = [tf.nest.pack_sequence_as(batch, shard) for shard in local]
            return self.function(Shards(shards, offsets))
        return self._run(self._cut, batch, local, [offsets])

    def _cut_before(self, batch: Any, leaves: list[Any]) -> tuple[list[list[Any]], Any]:
        """The leaves of each local shard of a batch that is already cut, and the offsets."""
        nothing = [None] * len(self._local)
        parts = [nothing if leaf is None else self._local_parts(leaf) for leaf in leaves]
        local = [list(shard) for shard in zip(*parts, strict=True)]
        offsets = partition.marked_offsets(batch)
        return local, self._foreign_offsets(local) if offsets is None else offsets

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

    def _foreign_offsets(self, local: list[Any]) -> Any:
        """The offsets of a batch that something else cut, which then holds each row once."""
        if tf.inside_function():
            raise DataError(
                "This batch does not know how many rows its global batch has: that is lost when a "
                "batch is passed into a tf.function of your own. Call step(batch) outside it, "
                "or pass the iterator in and call step(next(iterator)), or use "
                "step.run(iterator, steps)."
            )
        counts = [int(count_rows(shard)) for shard in local]
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
        with explaining_failures(self.strategy, lambda: _rows_of(batch)):
            return traces(batch, copies, further)


def _keeps_rows(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether steps are first traced for a known number of rows: on one GPU.

    On several the number of rows is what tells draws by row, and on CPUs nothing is gained.
    """
    alone = strategy.num_replicas_in_sync == 1
    return alone and bool(tf.config.list_logical_devices("GPU"))


def _open_rows(tensor: Any) -> Any:
    if tensor is None or isinstance(tensor, tf.SparseTensor) or not tensor.shape.rank:
        return tensor
    if tensor.shape[0] is None:
        return tensor
    hide = tf.compat.v1.placeholder_with_default
    if isinstance(tensor, tf.RaggedTensor):
        ragged: Any = tf.RaggedTensor
        splits = hide(tensor.row_splits, [None])
        return ragged.from_row_splits(tensor.values, splits, validate=False)
    return hide(tensor, [None, *tensor.shape[1:]])


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


def as_tensor(value: Any) -> Any:
    """Returns a leaf of a batch as a tensor; None stays None.

    Raises:
        DataError: It is something other than a tensor, an array or a number.
    """
    if value is None or tf.is_tensor(value):
        return value
    if not hasattr(value, "__array__") and not isinstance(value, (int, float)):
        raise DataError(
            f"A batch is a tensor or a tuple or dict of tensors. Received: {type(value).__name__} "
            "inside it. Give one element of tmg.distribute_dataset(dataset)."
        )
    with tf.device("CPU:0"):  # TensorFlow would put all of an array on the first GPU.
        # TensorFlow takes numbers of Python in 32 bits, NumPy in 64.
        plain = isinstance(value, (int, float))
        return tf.convert_to_tensor(value if plain else np.asarray(value))


def as_tensors(batch: Any) -> Any:
    """Returns a batch as tensors; None stays None.

    Raises:
        DataError: A leaf is something other than a tensor or an array, or has no rows.
    """
    return tf.nest.pack_sequence_as(batch, _tensors(batch, tf.nest.flatten(batch)))


def _tensors(batch: Any, leaves: list[Any]) -> list[Any]:
    tensors = [as_tensor(leaf) for leaf in leaves]
    for leaf, tensor in zip(leaves, tensors, strict=True):
        if tensor is not None and tensor.shape.rank == 0:
            raise DataError(
                "A batch has rows, but a component of this one is a single number. Received: "
                f"{leaf!r}. Give a batch of examples: dataset.batch(global_batch_size). A value "
                "that is the same for all rows is read by the model or the forward, such as a "
                "tf.Variable, not from the batch."
            )
    return tensors


def _rows_of(batch: Any) -> Any:
    known = partition.marked_global_rows(batch)
    if known is not None or any(
        isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(batch)
    ):
        return known
    return count_rows(batch)
