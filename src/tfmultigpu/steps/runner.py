"""Running a computation on batches: one by one, or many in a loop.

A ``Runner`` knows batches, programs and threads, and nothing of losses. What a step computes is its
``Computation``: from the shards of one global batch to a result and tallies. A call, a loop and the
sums of an epoch are views of the tallies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.lists import by_id
from tfmultigpu.recorder import noting
from tfmultigpu.steps.batches import BatchReader, LoopKind, Split, batch_of, rows_of, spec_of
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.other_states import Touched
from tfmultigpu.steps.pace import CallLength
from tfmultigpu.steps.program import Key, ManyBatches, Program, Programs
from tfmultigpu.steps.retraces import BATCH, Facts, Retraces
from tfmultigpu.steps.tally import (
    Tallies,
    Tally,
    add,
    logs_of,
    steps_of,
    tallies_of,
    vectors_of,
)
from tfmultigpu.steps.values import Batch, Call, Shards, Trace
from tfmultigpu.strategies.collectives import locks_of_calls, sending_lists
from tfmultigpu.strategies.topology import is_one_process
from tfmultigpu.types import Scalar, Shard, Tensor

LONG = 0.03  # Seconds of a step from which Python between steps is less than a fiftieth of it.


class Computation(Protocol):
    """What a step computes on one global batch.

    Attributes:
        strategy: The strategy.
        names: The names of its tallies: ``("",)`` for a step by itself, the names of the steps for
            a chain, none for predictions.
        logical_replicas: Into how many it cuts each batch; None if into one for each replica.
    """

    strategy: tf.distribute.Strategy
    names: tuple[str, ...]
    logical_replicas: int | None

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
        batches: What reads batches.
        programs: What is compiled, for each key of the computation.
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
        self.batches = BatchReader(self.strategy)
        self.programs = Programs(self.batches, computation.names, self._trace)
        self.touched = Touched()
        self._length = CallLength(self.strategy)
        self._name, self._done = type(computation).__name__, 0  # For who watches.

    def settle(self, spec: Callable[[], Any]) -> None:
        """Prepares the computation, if what a trace depends on has changed; before each step."""
        key = self.computation.key()
        if key is None or key != self.programs.key:
            self.computation.prepare(spec)
            key = self.computation.key()
            assert key is not None
            self.programs.turn_to(key)

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
        sending = sending_lists(once_a_call=not trace.inside)
        with self.touched.noting(), sending:
            result, tallies = self.computation.compute(shards, trace)
        trace.note_layouts(tallies)
        return result, vectors_of(tallies)

    # One batch ----------------------------------------------------------------------------------

    def __call__(self, batch: Shard) -> Any:
        """Computes one batch: an element of a distributed dataset, or a whole global batch."""
        with self._alone():
            if tf.inside_function():
                self.settle(lambda: spec_of(self.batches.read(batch)))
                return self.programs.compute_inside(self.batches.read(batch))[0]
            with self._retraces.watch():
                return self.call(self.batches.read(batch))[0]

    def call(self, batch: Batch) -> tuple[Any, Tallies]:
        """Runs one batch, with what watches the calls of the computation."""
        with noting("call", self._name, self._done + 1, tensors=batch[1][0]):
            # Here, for a chain calls each of its steps, and another may have run in between.
            self.settle(lambda: spec_of(batch))
            result = self.computation.around_call(self._run)(batch)
        self._done += 1
        return result

    @property
    def watches(self) -> bool:
        """True if something watches each call, which a loop cannot."""
        return self.computation.around_call(self._run) != self._run

    def _run(self, batch: Batch) -> tuple[Any, Tallies]:
        with explaining_failures(self.strategy, lambda: rows_of(batch)):
            program, arguments = self.programs.of_batch(batch)
            try:
                result, vectors = program.run(*arguments)
            except tf.errors.CancelledError:
                if not program.loses_errors:
                    raise
                self.programs.trace_for_each()
                with self._tracing_again():
                    return self._run(batch)  # Which raises what was lost.
        return result, tallies_of(program.trace.layouts, vectors)

    @contextmanager
    def _tracing_again(self) -> Iterator[None]:
        """Has logical replicas call one function again afterwards: other traces have other bits."""
        try:
            yield
        finally:
            if self.computation.logical_replicas is not None:
                self.programs.trace_for_each(why="")

    # Many batches -------------------------------------------------------------------------------

    def run(
        self,
        iterator: Any,
        steps: Scalar,
        *,
        logs_last: bool = True,
        before: Tallies | None = None,
    ) -> tuple[dict[str, Any], Tallies]:
        """Computes up to ``steps`` batches, and returns their logs and the tallies behind them.

        Both are of the steps ``before`` as well, if their tallies are given: so one sum is added in
        the order of the steps, however many a call computes.

        Without ``logs_last`` nothing is computed for the logs of the last step alone, such as the
        norm of its gradient, and of the logs of several calls ``"steps"`` alone is to be read.

        ::

            while there are steps left and the data has not ended:
                if calls are watched: call one batch
                else: one compiled loop over as many as pass between two looks at Ctrl-C
        """
        with self._alone(), self._retraces.watch():
            return self._run_many(iterator, steps, before or {}, logs_last=logs_last)

    def _run_many(
        self, iterator: Any, steps: Scalar, tallies: Tallies, *, logs_last: bool
    ) -> tuple[dict[str, Any], Tallies]:
        source, split, spec, kind = self.batches.open(iterator, logs_last=logs_last)
        if not (tf.is_tensor(steps) and tf.get_static_value(steps) is None):
            steps = check_count("steps", steps, error=ValueError)
        self.settle(lambda: spec)
        names = self.computation.names
        done: Tallies = {name: tallies.get(name, Tally.empty()) for name in names}
        if kind.inside:
            with explaining_failures(self.strategy):
                program = self.programs.of_loop(self.programs.loop_for(kind), split)
                return _run_loop(program, source, steps, done)

        ran, earlier = 0, steps_of(done)
        while ran < steps:
            # Asked each time: a call in turn may have begun with other traces.
            loop = self.programs.loop_for(kind)
            if self.watches or self._is_long(loop):
                batch = self._next_batch(source, split)
                if batch is not None:
                    done, ran = add(done, self._call_in_turn(batch, kind)), ran + 1
                    continue
                if ran or len(loop.layouts) == len(names):
                    break  # The logs of no step are known; else a loop has to say them.
            with explaining_failures(self.strategy):
                program = self.programs.of_loop(loop, split)
            # Ctrl-C is heard between calls.
            asked = min(program.most, steps - ran, self._length.steps)
            began = time.perf_counter()
            with (
                explaining_failures(self.strategy),
                self._finding_lost_errors(program, split),
                noting("call", self._name, self._done + 1, last=self._done + asked),
            ):
                logs, done = _run_loop(program, source, asked, done)
                self._done += asked
                if ran + asked == steps:  # Reading logs waits for a GPU.
                    return logs, done
                before, ran = ran, int(logs["steps"]) - earlier
                self._length.note(ran - before, began)
            if ran - before < asked:
                return logs, done
        if not ran:  # Tallies of no step do not know their layout.
            done = tallies_of(self.programs.loop_for(kind).layouts, vectors_of(done))
        return logs_of(done), done

    def _call_in_turn(self, batch: Batch, kind: LoopKind) -> Tallies:
        """Computes one of many batches by itself, and notes how long a step takes."""
        watches = self.watches
        began = time.perf_counter()
        tallies: Tallies = self.call(batch)[1]
        seconds = time.perf_counter() - began
        self.programs.loop_for(kind).note_call(seconds, tallies, watched=watches)
        return tallies

    def _is_long(self, loop: ManyBatches) -> bool:
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
            elements = program.take_back()
            if not (isinstance(error, tf.errors.CancelledError) and program.loses_errors):
                raise
            self.programs.trace_for_each()
            with self._tracing_again():
                for element in elements:
                    self._run(batch_of(element, split))  # Which raises what was lost.
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
            with noting("next batch", f"of {self._name}", self._done + 1):
                element = next(source, None)
            return None if element is None else batch_of(element, split)


def _run_loop(
    program: Program, source: Any, steps: Scalar, done: Tallies
) -> tuple[dict[str, Any], Tallies]:
    """Runs a compiled loop; returns its logs, and the tallies of what was done before as well."""
    logs, vectors = program.run(source, tf.cast(steps, tf.int64), *vectors_of(done))
    return dict(logs), tallies_of(program.trace.layouts, vectors)


def _kind_of(leaf: tf.Tensor | None) -> str:
    return "none" if leaf is None else f"{leaf.dtype.name}{leaf.shape}"
