"""Arguments of a step: global batches, whole or cut already, their kinds, and iterators."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfmultigpu.arguments import brief
from tfmultigpu.data import ShardIterator, partition
from tfmultigpu.data.batch_format import (
    any_rows,
    check_rows_agree,
    count_rows,
    structure_of,
    tensors_of,
    with_dependencies,
)
from tfmultigpu.data.small_batches import with_whole_shards
from tfmultigpu.errors import DataError, ScopeError
from tfmultigpu.steps.values import Batch, Shards
from tfmultigpu.strategies.topology import describe, is_one_process, local_replicas
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import Nested, Scalar, Shard, Tensor

_Result = TypeVar("_Result")
# Of an element of data to shards and offsets.
Split = Callable[[Any], tuple[list[Nested], Tensor]]

# Tests and benchmarks hold both ways to one device, without a GPU.
_forced: bool | None = None


def knows_rows_by_size(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether functions are made for the number of rows that they see first.

    On a GPU an operation of a step takes as long as the host needs to start it, and each shape that
    is not known is computed by a few; so there it pays to prepare a second function for batches of
    another size. Several processes would have to decide alike.
    """
    if _forced is not None:
        return _forced
    return is_one_process(strategy) and bool(tf.config.list_logical_devices("GPU"))


class BatchKind(NamedTuple):
    """A kind of batches, which has a program of its own.

    Attributes:
        structure: The structure, and whether it is a whole batch.
        leaves: The dtype and the shape of each tensor; without rows, where their number is open.
        knows_rows: Whether the number of rows may be known to the program.
        fixed: The offsets that each batch has, if they are known to the program as well.
    """

    structure: Hashable
    leaves: tuple[Any, ...]
    knows_rows: bool
    fixed: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class LoopKind:
    """A kind of iterators, which has a compiled loop of its own.

    Attributes:
        source: The type spec of TensorFlow's iterator.
        elements: What tells its elements apart: how they were cut, or their structure.
        never_ends: Whether the data has no end.
        logs_last: Whether all logs of the last step are computed.
        inside: Whether it is part of a ``tf.function`` of the user.
    """

    source: Any
    elements: Any
    never_ends: bool
    logs_last: bool
    inside: bool


class BatchReader:
    """Reads what a step is called with: a batch, or an iterator.

    Attributes:
        strategy: The strategy of the step.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy
        self._local = local_replicas(strategy)
        self._alone = strategy.num_replicas_in_sync == 1
        self._keeps_rows = knows_rows_by_size(strategy)

    def read(self, batch: Shard) -> Batch:
        """Returns a batch with the leaves of each local shard, and their offsets.

        A whole batch is one list of leaves, without offsets: it is cut in the compiled function.
        """
        check_called_from(self.strategy)
        leaves = tf.nest.flatten(batch)
        if all(leaf is None for leaf in leaves):
            count_rows(batch)  # Raises.
        if not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            return batch, [_tensors(leaves)], None
        leaves, offsets, checks = with_whole_shards(leaves)
        nothing = [None] * len(self._local)
        parts = [nothing if leaf is None else self._local_parts(leaf) for leaf in leaves]
        local = [list(shard) for shard in zip(*parts, strict=True)]
        local = with_dependencies(checks, local) if checks else local
        return batch, local, self._foreign_offsets(local) if offsets is None else offsets

    def kind_of(self, batch: Batch) -> BatchKind:
        """Returns the kind of a batch."""
        structure, local, offsets = batch
        leaves = [leaf for shard in local for leaf in shard]
        fixed = partition.fixed_offsets(leaves[0])
        keeps = self._keeps_rows or (self._alone and fixed is not None)
        kinds = tuple([_kind(leaf, 0 if keeps else 1) for leaf in leaves])
        is_whole = offsets is None
        if is_whole or not keeps:
            fixed = None
        return BatchKind((_structure_key(structure), is_whole), kinds, keeps, fixed)

    def open(self, iterator: Any, *, logs_last: bool) -> tuple[Any, Split, Any, LoopKind]:
        """Returns TensorFlow's iterator, what cuts its elements, the specs of one, and its kind."""
        check_called_from(self.strategy)
        if not isinstance(iterator, (ShardIterator, tf.data.Iterator)):
            what = "step.run takes an iterator, which remembers where it is."
            if isinstance(iterator, tf.distribute.DistributedIterator):
                what = (
                    "step.run reads the batches of tmg.distribute_dataset, and this iterator is "
                    "TensorFlow's own: it does not know how many rows a global batch has."
                )
            raise DataError(
                what,
                type(iterator).__name__,
                "Write iterator = iter(tmg.distribute_dataset(dataset, strategy)), then "
                "step.run(iterator, steps).",
            )
        split: Split
        elements: Any
        if isinstance(iterator, ShardIterator):
            source, cut, never_ends = iterator.source, iterator.cut, iterator.never_ends
            if cut.strategy is not self.strategy:
                raise DataError(
                    "The data was distributed for another strategy than the step was made for.",
                    f"data for {describe(cut.strategy)}; a step for {describe(self.strategy)}",
                    "Write tmg.distribute_dataset(dataset, step.strategy).",
                )
            split, elements, spec = cut.split, cut, cut.element_spec
        else:
            source, never_ends, spec = iterator, False, iterator.element_spec
            split, elements = functools.partial(cut_batch, self.strategy), structure_of(spec)
        of_source, inside = tf.type_spec_from_value(source), tf.inside_function()
        return source, split, spec, LoopKind(of_source, elements, never_ends, logs_last, inside)

    def _local_parts(self, leaf: Any) -> Any:
        parts = self.strategy.experimental_local_results(leaf)
        if len(parts) != len(self._local) or parts[0] is leaf:
            raise DataError(
                "The batch was distributed for another strategy than the step was made for.",
                f"{type(leaf).__name__} for {type(self.strategy).__name__} with "
                f"{self.strategy.num_replicas_in_sync} replica(s)",
                "Write tmg.distribute_dataset(dataset, step.strategy).",
            )
        return parts

    def _foreign_offsets(self, local: list[Any]) -> Any:
        """The offsets of a batch that something else cut, which then holds each row once."""
        if tf.inside_function():
            raise DataError(
                "Inside a tf.function the step does not know how many rows the global batch has.",
                "a batch that was an argument of the function, or that TensorFlow's own iterator "
                "yielded, such as one of strategy.experimental_distribute_dataset",
                "Write iterator = iter(tmg.distribute_dataset(dataset, strategy)), pass it into "
                "the function, and call step(next(iterator)) there; or call step(batch) outside.",
            )
        counts = [int(count_rows(shard)) for shard in local]
        told = WorkerExchange(self.strategy)("the rows of a batch", counts)
        everywhere = told.ravel().tolist()  # Workers, and their replicas, are in order.
        if 0 in everywhere:
            raise DataError(
                f"Replica {everywhere.index(0)} got no rows.",
                f"shards of {everywhere} rows",
                "Give step(batch) the batches of tmg.distribute_dataset as they are: the step "
                "computes one of fewer rows than replicas on all of them.",
            )
        return tf.constant([0, *itertools.accumulate(everywhere)], tf.int64)


def batch_of(element: Any, split: Split) -> Batch:
    """Returns an element of data as a batch."""
    local, offsets = split(element)
    return local[0], [tf.nest.flatten(shard) for shard in local], offsets


def rows_of(batch: Batch) -> Scalar:
    """Returns the number of rows of a batch."""
    _, local, offsets = batch
    return count_rows(local[0]) if offsets is None else offsets[-1]


def spec_of(batch: Batch) -> Any:
    """Returns the type specs of a batch, with its number of rows left open."""
    structure, local, _ = batch
    return tf.nest.pack_sequence_as(structure, list(map(any_rows, local[0])))


def cut_batch(strategy: tf.distribute.Strategy, batch: Shard) -> tuple[list[Any], Any]:
    """Returns a whole global batch as shards of equal size, and their offsets."""
    batch = tf.nest.pack_sequence_as(batch, _tensors(tf.nest.flatten(batch)))
    shares = (1,) * strategy.num_replicas_in_sync
    # Where batches come from: a GPU would be given the shards of all, to cut them.
    with tf.device("CPU:0"):
        checks = check_rows_agree(batch)
        with tf.control_dependencies(checks):
            offsets = tf.identity(partition.shard_offsets(count_rows(batch), shares))
        with tf.control_dependencies([offsets]):
            local = partition.cut_rows(batch, offsets, local_replicas(strategy))
    if checks and len(shares) == 1:  # Nothing is cut, so nothing would wait for the checks.
        local = [with_dependencies(checks, shard) for shard in local]
    return local, offsets


def on_shards(
    function: Callable[[Shards], _Result],
    strategy: tf.distribute.Strategy,
    local: list[Shard],
    offsets: Tensor,
) -> _Result:
    """Runs a function of shards in a graph; without offsets on one whole batch, which it cuts.

    For several replicas it is traced for any number of rows. Where the number is known, and to know
    it pays, TensorFlow puts the trace into this graph, and then computes no shape when it runs.
    """
    if offsets is None:
        local, offsets = cut_batch(strategy, local[0])
    leaves = tf.nest.flatten(local)
    is_known = any(leaf is not None and leaf.shape.rank and leaf.shape[0] for leaf in leaves)
    if strategy.num_replicas_in_sync == 1 or not is_known or not knows_rows_by_size(strategy):
        return function(shards_of(strategy, local, offsets))

    def run(*tensors: Tensor) -> _Result:
        *rows, places = tensors
        turn = iter(rows)
        filled = [None if leaf is None else next(turn) for leaf in leaves]
        packed = tf.nest.pack_sequence_as(local, filled)
        return function(shards_of(strategy, packed, places))

    tensors = tensors_of(local)
    specs = [any_rows(tensor) for tensor in tensors]
    specs.append(tf.TensorSpec(offsets.shape, offsets.dtype))
    traced = tf.function(run, autograph=False).get_concrete_function(*specs)
    result: _Result = traced(*tensors, offsets)
    return result


def shards_of(strategy: tf.distribute.Strategy, local: list[Any], offsets: Any) -> Shards:
    """Returns shards; shards of several replicas have open rows, which tells draws by row."""
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        local = tf.nest.map_structure(open_rows, local)
    return Shards.of(local, offsets, local_replicas(strategy), replicas)


def open_rows(tensor: Any) -> Any:
    """Returns a tensor whose number of rows is not known where it is traced."""
    is_dense = tensor is not None and not isinstance(tensor, tf.SparseTensor)
    if not is_dense or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    hide = tf.compat.v1.placeholder_with_default
    if isinstance(tensor, tf.RaggedTensor):
        ragged: Any = tf.RaggedTensor
        splits = hide(tensor.row_splits, [None])
        return ragged.from_row_splits(tensor.values, splits, validate=False)
    return hide(tensor, [None, *tensor.shape[1:]])


def check_called_from(strategy: tf.distribute.Strategy) -> None:
    """Checks that a step is called once for all replicas, and not under another strategy."""
    current = tf.distribute.get_strategy()
    in_replica = tf.distribute.get_replica_context() is not None
    if tf.distribute.has_strategy() and (in_replica or current is not strategy):
        raise ScopeError(
            "A step runs on all replicas of its strategy by itself.",
            f"a call {'on a replica' if in_replica else 'in the scope'} of "
            f"{type(current).__name__} with {current.num_replicas_in_sync} replica(s), of a step "
            f"for {type(strategy).__name__} with {strategy.num_replicas_in_sync}",
            "Call step(batch) outside of strategy.run, and of the scope of another strategy.",
        )


def _tensors(leaves: list[Any]) -> list[Any]:
    """Returns the leaves of a batch as tensors; None stays None."""
    arrays = [leaf if leaf is None or tf.is_tensor(leaf) else np.asarray(leaf) for leaf in leaves]
    for leaf, array in zip(leaves, arrays, strict=True):
        if array is not None and tf.TensorShape(array.shape).rank == 0:
            raise DataError(
                "A batch is a tensor or a tuple or dict of tensors with rows.",
                f"{type(leaf).__name__} {brief(leaf)} inside it",
                "Give an element of tmg.distribute_dataset(dataset.batch(global_batch_size), "
                "strategy). A value that is the same for all rows is read by the model or the "
                "forward, not from the batch.",
            )
    with tf.device("CPU:0"):  # TensorFlow would put all of an array on the first GPU.
        return [tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]


def known_spec(leaf: Tensor) -> Any:
    """Returns the type spec of a tensor, with its number of rows if that is one of its shape."""
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, tf.Tensor) else any_rows(leaf)


def _kind(leaf: Any, axis: int) -> Any:
    """Returns what a trace depends on; for a dense tensor cheaper than a type spec."""
    if isinstance(leaf, tf.Tensor):
        return leaf.dtype, tuple(leaf.shape[axis:]) if leaf.shape.rank else None
    return any_rows(leaf)


def _structure_key(structure: Shard) -> Any:
    """The structure without its leaves, hashable."""
    if isinstance(structure, (tuple, list)):
        return type(structure), tuple([_structure_key(part) for part in structure])
    if isinstance(structure, Mapping):
        return type(structure), tuple([(k, _structure_key(v)) for k, v in structure.items()])
    return structure is None
