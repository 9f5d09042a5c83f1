"""Functions of global batches, compiled once per kind of batch: whole ones, or cut already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfmultigpu.arguments import brief
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import (
    any_rows,
    check_rows_agree,
    count_rows,
    tensors_of,
    with_dependencies,
)
from tfmultigpu.data.small_batches import with_whole_shards
from tfmultigpu.errors import DataError, ScopeError
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.program import Program
from tfmultigpu.steps.slow import saying_if_slow
from tfmultigpu.steps.values import Batch, Shards, Trace
from tfmultigpu.strategies.topology import is_one_process, local_replicas
from tfmultigpu.strategies.worker_exchange import WorkerExchange
from tfmultigpu.types import BatchSpec, Graph, Shard, Tensor

_Result = TypeVar("_Result")

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


class BatchFunction:
    """A function of shards, compiled once per kind of batch whatever the number of rows.

    Called with a batch, it works out whether that is a whole global batch or one already cut, and
    runs ``function(shards)`` as a ``tf.function`` with the number of rows left open. Inside another
    ``tf.function`` it runs as part of that.

    The first number of rows is known to the function, if data always has it, or on a GPU. All
    others share a second one::

        one replica:        a trace for that number of rows, and one for any
        several replicas:   a trace for any number, called by a function of that number of rows,
                            which TensorFlow's optimizer puts in place of the shapes

    Attributes:
        function: From ``Shards`` to a nested structure of tensors; it notes in a ``Trace`` what it
            finds.
        strategy: The strategy the shards are for.
        programs: What it has compiled, by kind of batch.
    """

    def __init__(
        self, function: Callable[[Shards, Trace], Any], strategy: tf.distribute.Strategy
    ) -> None:
        self.function, self.strategy = function, strategy
        self._local = local_replicas(strategy)
        self._alone = strategy.num_replicas_in_sync == 1
        self._keeps_rows = knows_rows_by_size(strategy)
        self._kept: set[Hashable] = set()  # Of which structures one number of rows is known.
        self.programs: dict[Hashable, Program] = {}  # Cheaper than asking tf.function.
        self._functions: dict[Any, Any] = {}  # By structure of the batch.
        self._traces: dict[Graph, Trace] = {}  # Several kinds of batches may share a function.

    def __call__(self, batch: Shard) -> Any:
        """Runs the function on a batch."""
        local, offsets = self.parts_of(batch)
        if tf.inside_function():
            packed = [tf.nest.pack_sequence_as(batch, leaves) for leaves in local]
            return self._call(packed, offsets, Trace(inside=True))
        with self.explaining(batch, local, offsets):
            program, tensors = self.program_for(batch, local, offsets)
            return program.run(*tensors)

    def parts_of(self, batch: Shard) -> tuple[list[list[Any]], Any]:
        """Returns the leaves of each local shard, and their offsets.

        A whole batch is one list of leaves, without offsets: it is cut in the compiled function.
        """
        check_called_from(self.strategy)
        leaves = tf.nest.flatten(batch)
        if all(leaf is None for leaf in leaves):
            count_rows(batch)  # Raises.
        if not any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
            return [_tensors(leaves)], None
        leaves, offsets, checks = with_whole_shards(leaves)
        nothing = [None] * len(self._local)
        parts = [nothing if leaf is None else self._local_parts(leaf) for leaf in leaves]
        local = [list(shard) for shard in zip(*parts, strict=True)]
        local = with_dependencies(checks, local) if checks else local
        return local, self._foreign_offsets(local) if offsets is None else offsets

    def program_for(
        self, structure: Shard, local: list[list[Any]], offsets: Any
    ) -> tuple[Program, list[Tensor]]:
        """Returns the program for what ``parts_of`` returns, and its arguments."""
        leaves = [leaf for shard in local for leaf in shard]
        fixed = partition.fixed_offsets(leaves[0])
        keeps = self._keeps_rows or (self._alone and fixed is not None)
        kinds = [_kind(leaf, 0 if keeps else 1) for leaf in leaves]
        key = _structure_key(structure), offsets is None, tuple(kinds), keeps and fixed
        if (program := self.programs.get(key)) is None:
            keeps = keeps and key[:2] not in self._kept
            program = self._find(key[:2], structure, local, offsets, keeps=keeps)
            self.programs[key] = program
            if keeps:
                self._kept.add(key[:2])
        present = [leaf for leaf in leaves if leaf is not None]
        return program, present if offsets is None else [*present, offsets]

    def explaining(
        self, structure: Shard, local: list[list[Any]], offsets: Any
    ) -> AbstractContextManager[None]:
        """Returns the context in which a program runs on what ``parts_of`` returns."""
        return explaining_failures(
            self.strategy, lambda: count_rows(local[0]) if offsets is None else offsets[-1]
        )

    def _call(self, packed: list[Any], offsets: Any, trace: Trace) -> Any:
        local = packed
        if offsets is None:
            local, offsets = cut_batch(self.strategy, packed[0])

        def compute(shards: Shards) -> Any:
            return self.function(shards, trace)

        return on_shards(compute, self.strategy, local, offsets)

    def _find(
        self, key: Any, structure: Shard, local: list[list[Tensor]], offsets: Tensor, *, keeps: bool
    ) -> Program:
        """Returns a trace for a kind of batch: TensorFlow opens axes that differ between traces."""
        whole = offsets is None
        function = self._functions.get(key) or self._compile(structure, len(local), whole=whole)
        leaves = [leaf for shard in local for leaf in shard if leaf is not None]
        known = [_spec_of(leaf) for leaf in leaves]
        specs = known if keeps and self._alone else [any_rows(leaf) for leaf in leaves]
        if offsets is not None:
            places = tf.TensorSpec(offsets.shape, offsets.dtype)
            specs, known = [*specs, places], [*known, places]
        replicas = self.strategy.num_replicas_in_sync
        with saying_if_slow(
            f"A step is being traced for {replicas} replica(s), as at the first batch of each kind."
        ):
            concrete = function.get_concrete_function(*specs)
        self._functions[key] = function  # TensorFlow cannot trace again what failed at first.
        trace = self._traces[concrete.graph]
        if not keeps or self._alone:
            return Program(concrete, trace)
        fixed = partition.fixed_offsets(leaves[0])

        def around(*tensors: Tensor) -> Tensor:
            if fixed is None or whole:
                return concrete(*tensors)
            with tf.device("CPU:0"):
                places = tf.constant(fixed, tf.int64)
            return concrete(*tensors[:-1], places)

        run: Any = tf.function(around, autograph=False)
        return Program(run.get_concrete_function(*known), trace)

    def _compile(self, structure: Shard, copies: int, *, whole: bool) -> Any:
        absent = [leaf is None for leaf in tf.nest.flatten(structure)]
        skeleton = tf.nest.map_structure(lambda _: None, structure)  # Keeps no tensor alive.

        def function(*tensors: Any) -> Any:
            turn = iter(tensors)
            packed = [
                tf.nest.pack_sequence_as(skeleton, [None if no else next(turn) for no in absent])
                for _ in range(copies)
            ]
            trace = self._traces[tf.compat.v1.get_default_graph()] = Trace()
            return self._call(packed, None if whole else next(turn), trace)

        return tf.function(function, autograph=False, reduce_retracing=True)

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


def spec_of(batch: Batch) -> BatchSpec:
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
    """Runs a function of shards in a graph.

    For several replicas it is traced for any number of rows. Where the number is known, and to know
    it pays, TensorFlow puts the trace into this graph, and then computes no shape when it runs.
    """
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
        local = tf.nest.map_structure(_open_rows, local)
    return Shards.of(local, offsets, local_replicas(strategy), replicas)


def _open_rows(tensor: Any) -> Any:
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


def _spec_of(leaf: Tensor) -> BatchSpec:
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
