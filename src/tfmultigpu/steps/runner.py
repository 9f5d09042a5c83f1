"""Running a computation on batches: one by one, or many in a loop.

A ``Runner`` knows kinds of batches, traces and loops, and nothing of losses. What a step computes
is its ``Computation``: from the shards of one global batch to a result and tallies. A call, a loop
and the sums of an epoch are views of the tallies.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data import ShardIterator
from tfmultigpu.data.batch_format import GATHERED, structure_of
from tfmultigpu.errors import DataError, TfMultiGpuError
from tfmultigpu.lists import by_id
from tfmultigpu.steps.batches import (
    BatchFunction,
    check_called_from,
    cut_batch,
    on_shards,
    spec_of,
)
from tfmultigpu.steps.call_lengths import CallLength
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.graph_loop import loop_over
from tfmultigpu.steps.kept_batch import KeptBatch
from tfmultigpu.steps.other_states import Touched
from tfmultigpu.steps.program import Key, Program
from tfmultigpu.steps.retraces import BATCH, Facts, Retraces
from tfmultigpu.steps.tally import Layout, Tallies, Tally, add, logs_of
from tfmultigpu.steps.trace_cache import Loop, LoopKind, Split, TraceCache
from tfmultigpu.steps.values import Batch, Call, Shards, Trace
from tfmultigpu.strategies.collectives import (
    LISTED,
    locks_of_calls,
    replicas_share_memory,
    sending_lists,
)
from tfmultigpu.strategies.topology import describe, is_one_process
from tfmultigpu.types import Scalar, Shard, Tensor

LONG = 0.03  # Seconds of a step from which Python between steps is less than a fiftieth of it.
_ANY_SHAPE: Any = None  # Of a tally, whose vectors are scalars of no step.


class Computation(Protocol):
    """What a step computes on one global batch.

    Attributes:
        strategy: The strategy.
        names: The names of its tallies: ``("",)`` for a step by itself, the names of the steps for
            a chain, none for predictions.
    """

    strategy: tf.distribute.Strategy
    names: tuple[str, ...]

    def key(self) -> Key | None:
        """Returns what a trace depends on besides the batch; None: call ``prepare`` first."""

    def facts(self) -> Facts:
        """Returns by name what a trace depends on besides the batch, for a person to read."""

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds what a trace needs.

        Args:
            spec: Returns the type specs of a batch.
        """

    def compute(self, shards: Shards, trace: Trace) -> tuple[Any, Tallies]:
        """Computes one global batch; traced. Returns what a call returns, and the tallies."""

    def around_call(self, call: Call) -> Call:
        """Returns a call with what watches it; ``call`` itself if nothing does."""


class Runner:
    """Runs a computation on batches.

    Attributes:
        computation: What it runs.
        traces: What it has traced, for each key of the computation.
        touched: The state that its traces change, and the variables that they use.
        locks: The locks of what a call changes, which it holds: threads take turns. The locks of
            the strategy's collectives are among them, whatever the computation is.
    """

    def __init__(self, computation: Computation, locks: Sequence[threading.RLock] = ()) -> None:
        of_calls = locks_of_calls(computation.strategy)
        # Each thread takes them in the same order, or two could wait for each other.
        self.locks = sorted(by_id([threading.RLock(), *of_calls, *locks]).values(), key=id)
        self._retraces = Retraces()
        self.computation, self.strategy = computation, computation.strategy
        self.traces = TraceCache(lambda: BatchFunction(self._trace, self.strategy))
        self.touched = Touched()
        self._length = CallLength(self.strategy)
        self._why_each = ""

    @property
    def function(self) -> BatchFunction:
        """The function of one batch for what is trained and synchronized now."""
        return self.traces.now.function

    def settle(self, spec: Callable[[], Any]) -> None:
        """Prepares the computation, if what a trace depends on has changed; before each step."""
        key = self.computation.key()
        if key is None or key != self.traces.key:
            self.computation.prepare(spec)
            key = self.computation.key()
            assert key is not None
            self.traces.turn_to(key)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other threads from what a call changes."""
        with ExitStack() as held:
            for lock in self.locks:
                held.enter_context(lock)
            yield

    def _trace(self, shards: Shards, trace: Trace) -> tuple[Any, tuple[Tensor, ...]]:
        """Traces the computation: returns its result, and the vectors of its tallies."""
        kinds = tf.nest.map_structure(_kind_of, shards.local[0])
        self._retraces.note({**self.computation.facts(), BATCH: repr(kinds)})
        # Inside a function of the user nobody could ask a second time for an error that was lost.
        if trace.inside:
            trace.note_why_each("the step is part of a tf.function of the user's")
        trace.note_why_each(self._why_each)
        sending = sending_lists(once_a_call=not trace.inside)
        with self.touched.noting(), sending:
            result, tallies = self.computation.compute(shards, trace)
        trace.note_layouts(tallies)
        return result, _vectors(tallies)

    def _tallies(self, vectors: Sequence[Any], layouts: Mapping[str, Layout]) -> Tallies:
        """Returns the tallies that vectors belong to; compiled functions return vectors alone."""
        turn = iter(vectors)
        return {
            name: Tally(layouts.get(name), next(turn), next(turn))
            for name in self.computation.names
        }

    # One batch ----------------------------------------------------------------------------------

    def __call__(self, batch: Shard) -> Any:
        """Computes one batch: an element of a distributed dataset, or a whole global batch."""
        with self._alone():
            if tf.inside_function():
                self.settle(lambda: spec_of((batch, *self.function.parts_of(batch))))
                return self.function(batch)[0]
            with self._retraces.watch():
                return self.call((batch, *self.function.parts_of(batch)))[0]

    def call(self, batch: Batch) -> tuple[Any, Tallies]:
        """Runs one batch, with what watches the calls of the computation."""
        # Here, for a chain calls each of its steps, and another may have run in between.
        self.settle(lambda: spec_of(batch))
        return self.computation.around_call(self._run)(batch)

    @property
    def watches(self) -> bool:
        """True if something watches each call, which a loop cannot."""
        return self.computation.around_call(self._run) != self._run

    def _run(self, batch: Batch) -> tuple[Any, Tallies]:
        with self.function.explaining(*batch):
            program, arguments = self.function.program_for(*batch)
            try:
                result, vectors = program.run(*arguments)
            except tf.errors.CancelledError:
                if not program.loses_errors:
                    raise
                self._trace_for_each()
                program, arguments = self.function.program_for(*batch)
                result, vectors = program.run(*arguments)  # Which raises what was lost.
        return result, self._tallies(vectors, program.trace.layouts)

    def _trace_for_each(self) -> None:
        """Has the function of a replica traced for each from now on."""
        self._why_each = "TensorFlow has lost the error of a replica"
        self.traces.forget()

    # Many batches -------------------------------------------------------------------------------

    def run(
        self, iterator: Any, steps: Scalar, *, logs_last: bool = True
    ) -> tuple[dict[str, Any], Tallies]:
        """Computes up to ``steps`` batches, and returns their logs and the tallies behind them.

        Without ``logs_last`` nothing is computed for the logs of the last step alone, such as the
        norm of its gradient, and of the logs of several calls ``"steps"`` alone is to be read.

        ::

            while there are steps left and the data has not ended:
                if calls are watched: call one batch
                else: one compiled loop over as many as pass between two looks at Ctrl-C
        """
        with self._alone(), self._retraces.watch():
            return self._run_many(iterator, steps, logs_last=logs_last)

    def _run_many(
        self, iterator: Any, steps: Scalar, *, logs_last: bool
    ) -> tuple[dict[str, Any], Tallies]:
        source, elements, split = self._opened(iterator)
        if not (tf.is_tensor(steps) and tf.get_static_value(steps) is None):
            steps = check_count("steps", steps, error=ValueError)
        spec = (iterator.cut if isinstance(iterator, ShardIterator) else source).element_spec
        self.settle(lambda: spec)
        never_ends = isinstance(iterator, ShardIterator) and iterator.never_ends
        inside = tf.inside_function()
        kind = LoopKind(tf.type_spec_from_value(source), elements, never_ends, logs_last, inside)
        done: Tallies = {name: Tally.empty() for name in self.computation.names}
        if inside:
            with explaining_failures(self.strategy):
                program = self._program_of(self.traces.loop_for(kind), split)
                logs, vectors = program.run(source, tf.cast(steps, tf.int64), *_vectors(done))
            return dict(logs), self._tallies(vectors, program.trace.layouts)

        ran = 0
        while ran < steps:
            # Asked each time: a call in turn may have begun with other traces.
            loop = self.traces.loop_for(kind)
            if self.watches or self._is_long(loop):
                batch = self._next_batch(source, split)
                if batch is not None:
                    done, ran = add(done, self._call_in_turn(batch, kind)), ran + 1
                    continue
                if ran or len(loop.layouts) == len(self.computation.names):
                    break  # The logs of no step are known; else a loop has to say them.
            with explaining_failures(self.strategy):
                program = self._program_of(loop, split)
            # Ctrl-C is heard between calls.
            asked = min(program.most, steps - ran, self._length.steps)
            began = time.perf_counter()
            with explaining_failures(self.strategy), self._finding_lost_errors(program, split):
                logs, vectors = program.run(source, tf.cast(asked, tf.int64), *_vectors(done))
                done = self._tallies(vectors, program.trace.layouts)
                if ran + asked == steps:  # Reading logs waits for a GPU.
                    return dict(logs), done
                before, ran = ran, int(logs["steps"])
                self._length.note(ran - before, began)
            if ran - before < asked:
                return dict(logs), done
        if not ran:  # Tallies of no step do not know their layout.
            done = self._tallies(_vectors(done), self.traces.loop_for(kind).layouts)
        return logs_of(done), done

    def _call_in_turn(self, batch: Batch, kind: LoopKind) -> Tallies:
        """Computes one of many batches by itself, and notes how long a step takes."""
        watches = self.watches
        began = time.perf_counter()
        tallies: Tallies = self.call(batch)[1]
        seconds = time.perf_counter() - began
        self.traces.loop_for(kind).note_call(seconds, tallies, watched=watches)
        return tallies

    def _is_long(self, loop: Loop) -> bool:
        """Returns whether a step takes so long that a compiled loop would save nothing.

        To compile one takes as long as the first step, whose own function is there if that was
        watched. On a GPU a call does not wait for its step, so steps are short. Workers cannot
        measure alike, and compile a loop.
        """
        return is_one_process(self.strategy) and loop.seconds > LONG

    @contextmanager
    def _finding_lost_errors(self, program: Program, split: Split) -> Iterator[None]:
        """Computes the batch again of which TensorFlow has lost the error of a replica."""
        try:
            yield
        except BaseException as error:
            # Taken whatever failed, or the next loop would wait for room.
            elements = [element for kept in program.kept for element in kept.take()]
            if not (isinstance(error, tf.errors.CancelledError) and program.loses_errors):
                raise
            self._trace_for_each()
            for element in elements:
                self._run(_batch_of(element, split))  # Which raises what was lost.
            raise TfMultiGpuError(
                "A replica failed on one of these batches, and TensorFlow reports only that the "
                "others were cancelled.",
                "CancelledError",
                "The step is traced for each replica from now on, so run it again, or call "
                "step(batch), to see the error.",
            ) from error

    def _next_batch(self, source: Any, split: Split) -> Batch | None:
        """Returns the next batch of an iterator, cut; None at the end of its data."""
        with explaining_failures(self.strategy):
            element = next(source, None)
            return None if element is None else _batch_of(element, split)

    def _opened(self, iterator: Any) -> tuple[Any, Any, Split]:
        """Returns TensorFlow's iterator, what tells its elements apart, and what cuts one."""
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
        if not isinstance(iterator, ShardIterator):

            def split(element: Shard) -> tuple[list[Any], Any]:
                return cut_batch(self.strategy, element)

            return iterator, structure_of(iterator.element_spec), split
        if iterator.cut.strategy is not self.strategy:
            raise DataError(
                "The data was distributed for another strategy than the step was made for.",
                f"data for {describe(iterator.cut.strategy)}; a step for {describe(self.strategy)}",
                "Write tmg.distribute_dataset(dataset, step.strategy).",
            )
        return iterator.source, iterator.cut, iterator.cut.split

    def _program_of(self, loop: Loop, split: Split) -> Program:
        """Returns what computes many batches of an iterator; compiles it, if nothing has."""
        if loop.program is None:
            return loop.note_program(self._compiled(loop.kind, split))
        return loop.program

    def _sends_other_shapes(self, function: Any) -> bool:
        """Returns whether what replicas send has another shape in each step.

        Rows that are gathered have, and lists of them. In one call TensorFlow allows a collective
        one shape only.
        """
        names: list[str] = []
        for body in function.graph.as_graph_def().library.function:
            names += [node.name for node in body.node_def]
        gathers = not is_one_process(self.strategy) and any(GATHERED in name for name in names)
        return gathers or any(LISTED in name for name in names)

    def _compiled(self, kind: LoopKind, split: Split) -> Program:
        """Returns a loop over the batches of an iterator, compiled."""
        trace = Trace(logs_last=kind.logs_last, inside=kind.inside)
        keeps: list[KeptBatch] = []

        def compute(shards: Shards) -> tuple[Tensor, ...]:
            return self._trace(shards, trace)[1]

        def step(element: Shard, vectors: Sequence[Any]) -> Sequence[Any]:
            kept = KeptBatch(element)
            added = on_shards(compute, self.strategy, *split(kept.element))
            before, here = (self._tallies(each, trace.layouts) for each in (vectors, added))
            vectors = _vectors(add(before, here))
            if trace.functions and replicas_share_memory(self.strategy):
                keeps.append(kept)
                return kept.until(vectors)
            return vectors

        def run(source: Any, steps: Any, *vectors: Any) -> Any:
            vectors = loop_over(source, steps, step, vectors, never_ends=kind.never_ends)
            logs = logs_of(self._tallies(vectors, trace.layouts))
            return (logs if kind.logs_last else {"steps": logs["steps"]}), vectors

        function: Any = tf.function(run, autograph=False)
        vectors = [tf.TensorSpec(_ANY_SHAPE, tf.float64)] * 2 * len(self.computation.names)
        count = tf.TensorSpec([], tf.int64)
        concrete = function.get_concrete_function(kind.source, count, *vectors)
        most = math.inf
        # What is sent once a call is not in one that is part of another.
        sends = not kind.inside and self._sends_other_shapes(concrete)
        if sends and not replicas_share_memory(self.strategy):
            most = 1
        return Program(concrete, trace, most, keeps)


def _batch_of(element: Any, split: Split) -> Batch:
    local, offsets = split(element)
    return local[0], [tf.nest.flatten(shard) for shard in local], offsets


def _kind_of(leaf: tf.Tensor | None) -> str:
    return "none" if leaf is None else f"{leaf.dtype.name}{leaf.shape}"


def _vectors(tallies: Tallies) -> tuple[Tensor, ...]:
    return tuple(vector for tally in tallies.values() for vector in tally[1:])
