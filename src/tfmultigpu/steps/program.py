"""A computation on global batches that gives tallies: one by one, or many in a loop.

``compute(shards)`` gives a ``Tally``, or several of a chain. A call, a loop and the sums of an
epoch are views of it: the compiled function returns the tallies, and beside them the logs, so that
no view costs an operation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from typing_extensions import Self

from tfmultigpu.arguments import check_count
from tfmultigpu.data.batch_format import count_rows, structure_of
from tfmultigpu.errors import DataError
from tfmultigpu.steps.assignments import assign
from tfmultigpu.steps.batch_norm import short_sums
from tfmultigpu.steps.batches import BatchFunction, ShardSource, check_called_from
from tfmultigpu.steps.call_lengths import CallLength
from tfmultigpu.steps.data_loop import gathers_rows, is_uneven, loop_over, steps_of
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.features import SEES, Call, Feature, Pass, Phase, Replica, Rows, Sees, Shards
from tfmultigpu.steps.rows import standing_at
from tfmultigpu.steps.tally import Layout, Tallies, Tally, add, logs_of, nothing
from tfmultigpu.strategies.topology import describe, local_replicas, per_replica

# Of an element of data to shards and offsets.
Split = Callable[[Any], tuple[list[Any], Any]]
# One batch for a compiled function: a structure, the leaves of each shard, and offsets or None.
Batch = tuple[Any, list[list[Any]], Any]


class Program:
    """Runs ``compute`` on batches.

    Attributes:
        strategy: The strategy that it runs under.
        features: Its optional parts.
        names: The names of its tallies; ``("",)`` of a program that is not a chain.
        layouts: What the numbers of each tally are; known once traced.
    """

    names: tuple[str, ...] = ("",)

    def __init__(self, strategy: tf.distribute.Strategy, features: Sequence[Feature] = ()) -> None:
        """Takes the strategy and the features."""
        self.strategy, self.features = strategy, tuple(features)
        self.layouts: Mapping[str, Layout] = {}
        self._callers = [f for f in features if type(f).around_call is not Feature.around_call]
        self._functions: dict[Hashable, BatchFunction] = {}
        self._loops: list[tuple[Any, Any, float]] = []
        self._length = CallLength(strategy)
        self._key: Hashable = None
        self._is_prepared = False
        self._function: BatchFunction = BatchFunction(self._trace, strategy)

    @property
    def message_dtype(self) -> Any:
        """A narrower dtype that float32 gradients are sent in, of a feature; None for their own."""
        dtypes = (feature.message_dtype for feature in self.features)
        return next((dtype for dtype in dtypes if dtype is not None), None)

    @property
    def verification(self) -> Any:
        """The comparison of the last verified step with one device; None before the first."""
        results = [f.verification for f in self.features if hasattr(f, "verification")]
        return results[0] if results else None

    def compute(self, shards: Shards) -> Tallies:
        """Computes one global batch; traced."""
        raise NotImplementedError

    def key(self) -> Hashable:
        """Returns what a trace takes in beside the batch: another key is traced anew.

        None stands for a program that has to be prepared. Asked once it was.
        """
        return ()

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds what must be there before the first trace; called if the key has changed.

        Args:
            spec: Returns the type specs of a global batch.
        """
        raise NotImplementedError

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Any, *more: Any) -> Any:
        """Computes one batch: an element of a distributed dataset, or a whole global batch."""
        if more:
            raise TypeError(f"A step takes one batch, not {1 + len(more)}. Write step((x, y)).")
        self.settle(lambda: self._function.spec_of(batch))
        if tf.inside_function():
            return self._function(batch)[0]
        return self.call((batch, *self._function.parts_of(batch)))[0]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Computes up to ``steps`` batches in one call, which saves the cost of calls.

        Args:
            iterator: ``iter()`` of a distributed dataset, or of a plain dataset of global batches.
            steps: How many, at least 1.

        Returns:
            ``"steps"``, how many ran: fewer where the data ended. Losses are means over these
            steps, each output's by its own weight; weights and ``"skipped"`` are sums, the rest is
            that of the last step.

        Raises:
            DataError: It is not such an iterator, or one made for another strategy; or a batch has
                no rows.
            ValueError: ``steps`` is less than 1.
        """
        return self._looped(iterator, steps)[0]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def totals(self, iterator: Any, steps: int) -> Tallies:
        """Computes up to ``steps`` batches as ``run`` does; returns sums, by the name of a step."""
        return self._looped(iterator, steps)[1]

    def settle(self, spec: Callable[[], Any]) -> None:
        """Takes in what a trace depends on; called before each step."""
        if self._is_prepared and (key := self.key()) is not None and key == self._key:
            return
        self.prepare(spec)
        self._is_prepared, self._key = True, self.key()
        if self._key not in self._functions:
            self._functions[self._key] = BatchFunction(self._trace, self.strategy)
        self._function = self._functions[self._key]

    @property
    def kinds(self) -> int:
        """How many sets of layers were trained and synchronized, each with its traces."""
        return len(self._functions)

    def forget(self) -> None:
        """Lets go of all traces."""
        self._functions, self._loops, self._key = {}, [], None

    # For what ``compute`` does on replicas ----------------------------------------------------

    def phase(self, replica: Replica, run: Callable[..., Any] | None = None) -> Phase:
        """Returns the function of all replicas, as features cut, loop or compile it.

        Args:
            replica: The function of one replica.
            run: ``f(replica, shards)``; None for ``on_replicas``.
        """
        for feature in self.features:
            replica = feature.around_replica(replica)
        phase: Phase = functools.partial(run or self.on_replicas, replica)
        for feature in self.features:
            phase = feature.around_phase(phase)
        return phase

    def on_replicas(self, replica: Callable[..., Any], shards: Shards) -> list[Any]:
        """Runs a function on every replica of this process; returns the result of each."""
        spread = functools.partial(per_replica, self.strategy)
        places = (spread(shards.local), spread(shards.rows), spread(shards.state))
        result = self.strategy.run(replica, args=(*places, shards.factor, shards.total))
        copies = len(shards.local)
        flat = [self.strategy.experimental_local_results(r) for r in tf.nest.flatten(result)]
        flat = [each if len(each) == copies else each * copies for each in flat]  # None is one.
        local = [[each[number] for each in flat] for number in range(copies)]
        return [tf.nest.pack_sequence_as(result, one) for one in local]

    def commit(self, state: Sequence[Any], passes: list[Pass], after: Sequence[Any]) -> None:
        """Assigns what layers, draws and metrics have computed, after all that may fail.

        Args:
            state: The Keras variables that they assign.
            passes: That of each replica of this process, with the new values.
            after: What must not have failed before.
        """
        if state:
            values = per_replica(self.strategy, [one.state for one in passes])
            self.strategy.run(functools.partial(assign, state, after=after), args=(values,))

    def on_one_device(self) -> Self:
        """Returns the same for the default strategy, which computes a batch in one piece.

        It is for ``look``: all variables are those of this program.
        """
        features = [feature.on_one_device() for feature in self.features]
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        Program.__init__(twin, tf.distribute.get_strategy(), [f for f in features if f is not None])
        twin.bind()
        return twin

    def bind(self) -> None:
        """Gives itself to its features, once its attributes are there."""
        for feature in self.features:
            feature.bind(self)

    @contextmanager
    def tracing_model(self, rows: Rows) -> Iterator[None]:
        """Enters, on a replica, the contexts in which the code of the user is traced."""
        with ExitStack() as contexts:
            contexts.enter_context(short_sums())
            contexts.enter_context(standing_at(rows))
            for feature in self.features:
                contexts.enter_context(feature.around_model(rows))
            yield

    # One batch ----------------------------------------------------------------------------------

    def call(self, batch: Batch) -> tuple[dict[str, Any], Tallies]:
        """Runs one batch, with what features do around a call."""
        call: Call = self._run
        for feature in self._callers:
            call = feature.around_call(call)
        return call(batch)

    def sees(self) -> Sees:
        """Returns which batches a feature wants to see by themselves."""
        return min((f.sees for f in self._callers), key=SEES.index, default="none")

    def is_seen(self, batch: Batch) -> bool:
        """Returns whether a batch is one of these."""
        sees = self.sees()
        if sees != "uneven":
            return sees == "all"
        counts = self.rows_of(batch)
        return sum(counts) >= len(counts) and min(counts) < max(counts)

    def rows_of(self, batch: Batch) -> list[int]:
        """Returns how many rows each replica has of a batch, of all workers, if it is cut."""
        _, local, offsets = batch
        if offsets is not None:
            bounds = offsets.numpy().tolist()
            return [stop - start for start, stop in itertools.pairwise(bounds)]
        replicas = self.strategy.num_replicas_in_sync
        first = next(leaf for leaf in local[0] if leaf is not None)
        rows = first.shape[0]
        rows = int(count_rows(first)) if rows is None else rows
        return [rows // replicas + (number < rows % replicas) for number in range(replicas)]

    def _run(self, batch: Batch) -> tuple[dict[str, Any], Tallies]:
        logs, vectors = self._function.run(*batch)
        return logs, self._tallies(vectors)

    def traced(self, shards: Shards) -> Any:
        """Returns what a call returns, and the vectors of the tallies."""
        tallies = self.compute(shards)
        self.layouts = {name: tally.layout for name, tally in tallies.items() if tally.layout}
        logs = logs_of(tallies)
        del logs["steps"]
        return logs, _vectors(tallies)

    def _trace(self, shards: Shards) -> Any:
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.around_trace())
            return self.traced(shards)

    def _tallies(self, vectors: Sequence[Any]) -> Tallies:
        turn = iter(vectors)
        layouts = self.layouts
        names = self.names if vectors else ()
        return {name: Tally(layouts.get(name), next(turn), next(turn)) for name in names}

    # Many batches -------------------------------------------------------------------------------

    def _looped(self, iterator: Any, steps: Any) -> tuple[dict[str, Any], Tallies]:
        source, key, split = self._opened(iterator, steps)
        spec = iterator.batch_spec if isinstance(iterator, ShardSource) else source.element_spec
        self.settle(lambda: spec)
        done: Tallies = {name: nothing() for name in self.names}
        element, ended = None, tf.inside_function()
        while True:
            if element is None and not ended and self.sees() == "all":
                with explaining_failures(self.strategy):
                    element = next(source, None)
                ended = element is None
            if element is not None:
                with explaining_failures(self.strategy):
                    local, offsets = split(element)
                leaves = [tf.nest.flatten(shard) for shard in local]
                _, tallies = self.call((local[0], leaves, offsets))
                done, steps, element = add(done, tallies), steps - 1, None
                if steps == 0:
                    return logs_of(done), done
                continue
            loop = self._find((self._key, key, tf.type_spec_from_value(source)), split)
            before = _vectors(done)
            with explaining_failures(self.strategy):
                logs, vectors, element = self._in_calls(loop, source, steps, before)
            done = self._tallies(vectors)
            if element is None:
                return dict(logs), done
            steps -= steps_of(vectors) - steps_of(before)

    def _in_calls(self, loop: Any, source: Any, steps: Any, vectors: Any) -> Any:
        """Runs the loop in calls that are short enough for Ctrl-C, which is heard between them.

        Returns:
            Logs and vectors; and the element that was taken for a step of its own, or None.
        """
        run, most = loop
        inside = tf.inside_function()
        watches = not inside and self.sees() == "uneven"

        def call(count: Any) -> Any:
            logs, after, waits, optional = run(source, tf.cast(count, tf.int64), watches, *vectors)
            waits = watches and bool(waits)  # Known on the CPU without waiting for a GPU.
            return logs, after, optional.get_value() if waits else None

        left = 0 if inside else int(steps)
        while (asked := min(most, self._length.most(left))) < left:
            with self._length.measuring() as note:
                before = steps_of(vectors)
                logs, vectors, element = call(asked)
                ran = int(logs["steps"]) - before  # Reading it waits for the steps.
                note(ran)
            left -= ran
            if ran < asked:
                return logs, vectors, element
        return call(steps if inside else left)

    def _opened(self, iterator: Any, steps: Any) -> tuple[Any, Any, Split]:
        """Checks what a loop is given.

        Returns:
            TensorFlow's iterator, what distinguishes its elements, and what makes shards of one.
        """
        check_called_from(self.strategy)
        if not isinstance(iterator, (ShardSource, tf.data.Iterator)):
            raise DataError(
                "step.run takes an iterator, which remembers where it is between calls. Received: "
                f"{type(iterator).__name__}. Write iterator = "
                "iter(tmg.distribute_dataset(dataset, strategy)), then step.run(iterator, steps)."
            )
        if not (tf.is_tensor(steps) and tf.get_static_value(steps) is None):
            check_count("steps", steps, error=ValueError)
        if not isinstance(iterator, ShardSource):
            return iterator, structure_of(iterator.element_spec), self._function.cut
        if iterator.strategy is not self.strategy:
            raise DataError(
                "The data was distributed for another strategy than the step was made for. "
                f"Received: data for {describe(iterator.strategy)}; a step for "
                f"{describe(self.strategy)}. Give distribute_dataset and make_train_step "
                "the same strategy: tmg.distribute_dataset(dataset, strategy)."
            )
        return iterator.source, iterator.split_key, iterator.split

    def _find(self, kind: Any, split: Split) -> tuple[Any, float]:
        """Returns the compiled loop for a kind of iterator, and the most steps of a call."""
        for known, run, most in self._loops:  # Specs of dicts compare but do not hash.
            if known == kind:
                return run, most
        scalars = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool)
        vectors = [tf.TensorSpec([None], tf.float64)] * 2 * len(self.names)
        run = self._compile(split).get_concrete_function(kind[-1], *scalars, *vectors)
        # In one call TensorFlow allows a collective of several workers one shape only, and gathered
        # rows differ from batch to batch.
        several = len(local_replicas(self.strategy)) < self.strategy.num_replicas_in_sync
        most = 1 if several and gathers_rows(run) else math.inf
        self._loops.append((kind, run, most))
        return run, most

    def _compile(self, split: Split) -> Any:
        function = self._function

        def step(element: Any, vectors: Sequence[Any]) -> Sequence[Any]:
            _, added = self._trace(function.shards(*split(element)))
            return _vectors(add(self._tallies(vectors), self._tallies(added)))

        replicas = self.strategy.num_replicas_in_sync
        waiting = self.sees() != "none"

        def run(source: Any, steps: Any, watches: Any, *vectors: Any) -> Any:
            def waits(element: Any) -> Any:
                return watches & is_uneven(split(element)[1], replicas)

            stop = waits if waiting else None
            *end, vectors = loop_over(source, steps, step, stop, vectors)
            return logs_of(self._tallies(vectors)), vectors, *end

        return tf.function(run, autograph=False)


def _vectors(tallies: Tallies) -> tuple[Any, ...]:
    return tuple(vector for tally in tallies.values() for vector in tally[1:])
