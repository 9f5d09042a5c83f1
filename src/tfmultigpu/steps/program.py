"""Compiled functions, each with what its own trace found, and the one cache of them.

What a step found out is asked of the program that ran, never of the last trace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.batch_format import GATHERED, any_rows
from tfmultigpu.lists import present
from tfmultigpu.recorder import noting
from tfmultigpu.steps.batches import BatchKind, BatchReader, LoopKind, Split, known_spec, on_shards
from tfmultigpu.steps.pace import saying_if_slow
from tfmultigpu.steps.tally import Layout, Tallies, add, layouts_of, logs_of, tallies_of, vectors_of
from tfmultigpu.steps.traced_once import packed, spec_of, tensors_in
from tfmultigpu.steps.values import Batch, Shards, Trace
from tfmultigpu.strategies.collectives import LISTED, replicas_share_memory
from tfmultigpu.strategies.topology import is_one_process
from tfmultigpu.types import Batches, Scalar, Shard, Tensor

MOST = 16  # Records: who trains one layer after another does not keep a program of each.

# Traces a step: from shards to its result, and the vectors of its tallies.
Compute = Callable[[Shards, Trace], tuple[Any, tuple[Tensor, ...]]]


class Key(NamedTuple):
    """What the traces of a computation take in besides the batch.

    Attributes:
        version: What does not come back: settings of an optimizer, the variables of a model. The
            programs of other versions are let go.
        kind: What may come back, such as layers that are frozen and trained in turn.
    """

    version: Hashable
    kind: Hashable


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled function, for one kind of batch or of iterator.

    Attributes:
        run: The concrete function.
        trace: What its own trace found: the layouts of its tallies, and whether it is part of a
            ``tf.function`` of the user.
        most: The most steps of one call.
        kept: The batch that a loop computes, if one trace serves all replicas, whose error may be
            lost; nothing otherwise.
    """

    run: Any
    trace: Trace
    most: float = math.inf
    kept: Sequence[KeptBatch] = ()

    @property
    def loses_errors(self) -> bool:
        """True if TensorFlow may report another error than the replica had that failed."""
        return bool(self.trace.functions)

    def take_back(self) -> list[Any]:
        """Returns the elements of data whose step has failed, and keeps them no longer."""
        elements: list[Any] = []
        for kept in self.kept:
            elements += kept.take()
        return elements


@dataclasses.dataclass(eq=False)
class ManyBatches:
    """Many batches of one kind of iterator, in a compiled loop or called in turn.

    Attributes:
        kind: What it serves.
        program: The compiled loop; None if there is none yet.
        layouts: What the numbers of each tally are, by the name of the tally.
        seconds: What a step took that was called by itself among many; infinite if it was watched,
            which says that its function is there, and not how long a step takes.
    """

    kind: LoopKind
    program: Program | None = None
    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def note_program(self, program: Program) -> Program:
        """Notes the compiled loop, and returns it."""
        self.program, self.layouts = program, program.trace.layouts
        return program

    def note_call(self, seconds: float, tallies: Tallies, *, watched: bool) -> None:
        """Notes how long a step took; what is watched takes longer than later steps will."""
        self.seconds = math.inf if watched else seconds
        self.layouts = layouts_of(tallies)


@dataclasses.dataclass(eq=False)
class Record:
    """Programs of one key of a computation.

    Attributes:
        batches: The program of one batch, by its kind: cheaper than asking a ``tf.function``.
        functions: The ``tf.function`` of one batch, by the structure of the batch.
        traces: What the traces of these found, by graph: several kinds of batches may share one.
        loops: The loops over many batches.
    """

    batches: dict[BatchKind, Program] = dataclasses.field(default_factory=dict)
    functions: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    traces: dict[Any, Trace] = dataclasses.field(default_factory=dict)
    loops: list[ManyBatches] = dataclasses.field(default_factory=list)

    @property
    def programs(self) -> list[Program]:
        """All programs."""
        return [*self.batches.values(), *present(loop.program for loop in self.loops)]


class Programs:
    """Programs of a computation: a record for each of its keys.

    A record stays while another key is the current one: layers that are frozen and trained in turn
    are traced twice in all. Records are let go

    - if they are of another version, such as of other settings of the optimizer, which each of them
      holds as a constant: it does not come back;
    - if there are more than ``MOST``, those that were turned to longest ago;
    - all at once, by ``trace_for_each``, if TensorFlow has lost the error of a replica.

    The number of rows is open in a program, whether a batch is whole or cut already. The first one
    is known to it, if data always has it, or on a GPU. All others share a second program::

        one replica:        a trace for that number of rows, and one for any
        several replicas:   a trace for any number, called by a function of that number of rows,
                            which TensorFlow's optimizer puts in place of the shapes

    Attributes:
        key: What is trained and synchronized now; None before the first batch.
        now: The record of that key.
    """

    def __init__(self, reader: BatchReader, names: Sequence[str], compute: Compute) -> None:
        """Begins without a program.

        Args:
            reader: What reads batches.
            names: The names of the tallies.
            compute: What is traced.
        """
        self._reader, self._strategy = reader, reader.strategy
        self._names, self._compute = names, compute
        self._why_each = ""
        self._records: dict[Key, Record] = {}  # The current one last.
        self.key: Key | None = None
        self.now = Record()

    def __len__(self) -> int:
        """Returns for how many keys there is a record."""
        return len(self._records)

    def turn_to(self, key: Key) -> None:
        """Makes a key the current one, and lets records go."""
        self.key = key
        self.now = self._records.pop(key) if key in self._records else Record()
        for other in list(self._records):
            if other.version != key.version or len(self._records) >= MOST:
                del self._records[other]
        self._records[key] = self.now

    def trace_for_each(self, why: str = "TensorFlow has lost the error of a replica") -> None:
        """Has the function of a replica traced for each from now on, in place of all programs.

        Args:
            why: The reason; "" has one trace serve all replicas again.
        """
        assert self.key is not None
        self._why_each, self._records = why, {}
        self.turn_to(self.key)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Compiles anew what is called in the context, and forgets it at the end."""
        kept = self.key, self.now, self._records
        self.now, self._records = Record(), {}
        try:
            yield
        finally:
            self.key, self.now, self._records = kept

    def _new_trace(self, *, logs_last: bool = True, inside: bool = False) -> Trace:
        why_each = self._why_each
        if inside:  # There nobody could ask a second time for an error that was lost.
            why_each = "the step is part of a tf.function of the user's"
        lost = bool(self._why_each)
        return Trace(why_each=why_each, finds_error=lost, logs_last=logs_last, inside=inside)

    # One batch ----------------------------------------------------------------------------------

    def compute_inside(self, batch: Batch) -> Any:
        """Computes a batch as a part of the ``tf.function`` of the user that is being traced."""
        structure, local, offsets = batch
        packed = [tf.nest.pack_sequence_as(structure, leaves) for leaves in local]
        return self._computed(packed, offsets, self._new_trace(inside=True))

    def _computed(self, packed: list[Shard], offsets: Tensor, trace: Trace) -> Any:
        return on_shards(
            lambda shards: self._compute(shards, trace), self._strategy, packed, offsets
        )

    def of_batch(self, batch: Batch) -> tuple[Program, list[Tensor]]:
        """Returns the program of a batch, and its arguments; compiles it, if nothing has."""
        _, local, offsets = batch
        kind = self._reader.kind_of(batch)
        tensors = [leaf for shard in local for leaf in shard if leaf is not None]
        if (program := self.now.batches.get(kind)) is None:
            program = self.now.batches[kind] = self._compile_batch(batch, kind, tensors)
        return program, tensors if offsets is None else [*tensors, offsets]

    def _compile_batch(self, batch: Batch, kind: BatchKind, tensors: list[Tensor]) -> Program:
        """Returns a trace for a kind of batch: TensorFlow opens axes that differ between traces."""
        record, replicas = self.now, self._strategy.num_replicas_in_sync
        # One number of rows is known for each structure.
        alike = [other for other in record.batches if other.structure == kind.structure]
        knows_rows = kind.knows_rows and not any(other.knows_rows for other in alike)

        known = list(map(known_spec, tensors))
        specs = known if knows_rows and replicas == 1 else list(map(any_rows, tensors))
        offsets = batch[2]
        if offsets is not None:
            places = tf.TensorSpec(offsets.shape, offsets.dtype)
            specs, known = [*specs, places], [*known, places]
        function = record.functions.get(kind.structure) or self._function_of(batch, record.traces)
        slow = saying_if_slow(
            "The first step with a new kind of batch takes longer, because TensorFlow makes a "
            f"graph of your Python code for {replicas} replica(s)"
        )
        with slow, noting("trace"):
            concrete = function.get_concrete_function(*specs)
        # TensorFlow cannot trace again what failed at first.
        record.functions[kind.structure] = function
        trace = record.traces[concrete.graph]
        if replicas == 1 or not knows_rows:
            return Program(concrete, trace)

        def around(*tensors: Tensor) -> Tensor:
            if kind.fixed is None:
                return concrete(*tensors)
            with tf.device("CPU:0"):
                places = tf.constant(kind.fixed, tf.int64)
            return concrete(*tensors[:-1], places)

        run: Any = tf.function(around, autograph=False)
        return Program(run.get_concrete_function(*known), trace)

    def _function_of(self, batch: Batch, traces: dict[Any, Trace]) -> Any:
        """Returns a ``tf.function`` of the tensors of a batch, which notes its traces."""
        structure, local, offsets = batch
        copies, is_whole = len(local), offsets is None
        absent = [leaf is None for leaf in tf.nest.flatten(structure)]
        skeleton = tf.nest.map_structure(lambda _: None, structure)  # Keeps no tensor alive.

        def function(*tensors: Any) -> Any:
            turn = iter(tensors)
            packed: list[Shard] = []
            for _ in range(copies):
                leaves = [None if is_absent else next(turn) for is_absent in absent]
                packed.append(tf.nest.pack_sequence_as(skeleton, leaves))
            trace = traces[tf.compat.v1.get_default_graph()] = self._new_trace()
            return self._computed(packed, None if is_whole else next(turn), trace)

        return tf.function(function, autograph=False, reduce_retracing=True)

    # Many batches -------------------------------------------------------------------------------

    def loop_for(self, kind: LoopKind) -> ManyBatches:
        """Returns what computes many batches of a kind of iterator now."""
        for loop in self.now.loops:  # Specs of dicts compare but do not hash.
            if loop.kind == kind:
                return loop
        loop = ManyBatches(kind)
        self.now.loops.append(loop)
        return loop

    def of_loop(self, loop: ManyBatches, split: Split) -> Program:
        """Returns the program of many batches; compiles it, if nothing has."""
        if loop.program is None:
            return loop.note_program(self._compile_loop(loop.kind, split))
        return loop.program

    def _compile_loop(self, kind: LoopKind, split: Split) -> Program:
        trace = self._new_trace(logs_last=kind.logs_last, inside=kind.inside)
        in_memory = replicas_share_memory(self._strategy)
        keeps: list[KeptBatch] = []

        def compute(shards: Shards) -> tuple[Tensor, ...]:
            return self._compute(shards, trace)[1]

        def step(element: Shard, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
            kept = KeptBatch(element)
            added = on_shards(compute, self._strategy, *split(kept.element))
            before, here = (tallies_of(trace.layouts, part) for part in (vectors, added))
            vectors = vectors_of(add(before, here))
            if trace.functions and in_memory:
                keeps.append(kept)
                return kept.until(vectors)
            return vectors

        def run(source: Any, steps: Any, *vectors: Any) -> Any:
            vectors = _loop_over(source, steps, step, vectors, never_ends=kind.never_ends)
            logs = logs_of(tallies_of(trace.layouts, vectors))
            return (logs if kind.logs_last else {"steps": logs["steps"]}), vectors

        function: Any = tf.function(run, autograph=False)
        vectors = [_VECTOR] * 2 * len(self._names)
        with noting("trace"):
            concrete = function.get_concrete_function(
                kind.source, tf.TensorSpec([], tf.int64), *vectors
            )
        # What is sent once a call is not in one that is part of another.
        sends = not kind.inside and _sends_other_shapes(concrete, self._strategy)
        return Program(concrete, trace, 1 if sends and not in_memory else math.inf, keeps)


def _sends_other_shapes(function: Any, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether what replicas send has another shape in each step.

    Rows that are gathered have, and lists of them. In one call TensorFlow allows a collective one
    shape only.
    """
    names: list[str] = []
    for body in function.graph.as_graph_def().library.function:
        names += [node.name for node in body.node_def]
    gathers = not is_one_process(strategy) and any(GATHERED in name for name in names)
    return gathers or any(LISTED in name for name in names)


# A loop over the batches of an iterator, in a graph -----------------------------------------------


# A step in a loop: from a batch, and the vectors before it, to those after it.
_Body = Callable[[Shard, Sequence[Tensor]], Sequence[Tensor]]
_ANY_SHAPE: Any = None
_VECTOR: Any = tf.TensorSpec(_ANY_SHAPE, tf.float64)  # Of a tally; of no step it is a scalar.


def _loop_over(
    source: Batches, steps: Scalar, step: _Body, vectors: Sequence[Tensor], *, never_ends: bool
) -> tuple[Tensor, ...]:
    """Reads each element before its step, which is in a branch if the data may have ended.

    A branch takes in each variable by an operation of its own.

    Args:
        source: TensorFlow's iterator.
        steps: The most steps, an integer scalar.
        step: The step.
        vectors: The vectors before the first step.
        never_ends: Whether the data has no end.

    Returns:
        The vectors after the last step.
    """

    def body(left: Scalar, *vectors: Tensor) -> tuple[Tensor, ...]:
        if never_ends:
            vectors = tuple(step(source.get_next(), vectors))
            with tf.device("CPU:0"):
                return (left - 1, *vectors)
        optional = source.get_next_as_optional()
        more = optional.has_value()
        vectors = tf.cond(more, lambda: step(optional.get_value(), vectors), lambda: vectors)
        with tf.device("CPU:0"):
            return ((left - 1) * tf.cast(more, tf.int32), *vectors)

    # What decides about going on is on the CPU, and loops keep it there in 32 bits: a step would
    # begin only after a GPU had ended the one before.
    with tf.device("CPU:0"):
        left = tf.cast(tf.minimum(steps, tf.int32.max), tf.int32)
    _, *vectors = tf.while_loop(
        lambda left, *_: left > 0,
        body,
        [left, *vectors],
        shape_invariants=[left.shape, *[_VECTOR.shape] * len(vectors)],
        parallel_iterations=1,
    )
    return tuple(vectors)


class KeptBatch:
    """The element of data that a loop computes, kept for an error that TensorFlow loses.

    It is in a queue for one, from before a step until after it. Tensors are kept, not copied:
    replicas share memory. The element of a step that fails stays.
    """

    def __init__(self, element: Any) -> None:
        """Begins with an element, inside a ``tf.function``: give ``element`` to the step."""
        self._before = tensors_in(element)
        self._after = [tf.identity(tensor) for tensor in self._before]
        self.element = packed(element, self._after)
        self._structure = tf.nest.map_structure(spec_of, element)

    def until(self, results: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Keeps the element until there are these results of the step; returns them."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._queue = tf.queue.FIFOQueue(1, [tensor.dtype for tensor in self._before])
        put = self._queue.enqueue(self._before)
        for tensor in self._after:
            _compat.add_control_inputs(tensor.op, [put])
        with tf.control_dependencies(results):
            taken = self._queue.dequeue()
        with tf.control_dependencies(tf.nest.flatten(taken)):
            return tuple([tf.identity(result) for result in results])

    def take(self) -> list[Any]:
        """Returns the element of a step that has failed, and keeps it no longer; [] if none has."""
        if not int(self._queue.size()):
            return []
        tensors = tf.nest.flatten(self._queue.dequeue())
        return [packed(self._structure, tensors)]
