"""A computation on global batches that gives tallies: one by one, or many in a loop.

``compute(shards)`` gives a ``Tally``, or several of a chain. A call, a loop and the sums of an
epoch are views of it: the compiled function returns the tallies, and beside them the logs.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.data import ShardIterator
from tfmultigpu.data.batch_format import structure_of
from tfmultigpu.errors import DataError
from tfmultigpu.steps.agreement import check_values_alike
from tfmultigpu.steps.assignments import assign
from tfmultigpu.steps.batch_norm import short_sums
from tfmultigpu.steps.batches import BatchFunction, check_called_from
from tfmultigpu.steps.build_model import prepare_model
from tfmultigpu.steps.call_lengths import CallLength
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.features import Batch, Call, Feature, Pass, Phase, Replica, Rows, Shards
from tfmultigpu.steps.global_rows import GATHERED, standing_at
from tfmultigpu.steps.tally import Layout, Tallies, Tally, add, logs_of
from tfmultigpu.strategies.topology import describe, local_replicas, per_replica

# Of an element of data to shards and offsets.
Split = Callable[[Any], tuple[list[Any], Any]]
_ANY_SHAPE: Any = None  # Of a tally, whose vectors are scalars of no step.


class Program:
    """Runs ``compute`` on batches.

    Attributes:
        names: The names of its tallies; ``("",)`` of a program that is not a chain.
        layouts: What the numbers of each tally are; known once traced.
        function: The traces of a batch.
        functions: The same by what was trained and synchronized, which ``key`` returns.
    """

    names: tuple[str, ...] = ("",)
    model: Any  # Of programs of one model.
    forward: Any  # Of programs with a loss.

    def __init__(self, strategy: tf.distribute.Strategy, features: Sequence[Feature] = ()) -> None:
        """Takes the strategy, and its optional parts."""
        self.strategy, self.features = strategy, tuple(features)
        self.layouts: Mapping[str, Layout] = {}
        self._callers = [f for f in features if type(f).around_call is not Feature.around_call]
        self.functions: dict[Hashable, BatchFunction] = {}
        self._loops: list[tuple[Any, Any, float]] = []
        self._length = CallLength(strategy)
        self._key: Hashable = None
        self.function: BatchFunction = BatchFunction(self._trace, strategy)

    @property
    def verification(self) -> Any:
        """The comparison of the last verified step with one device; None before the first."""
        return next((f.verification for f in self.features if hasattr(f, "verification")), None)

    def compute(self, shards: Shards) -> Tallies:
        """Computes one global batch; traced."""
        raise NotImplementedError

    def key(self) -> Hashable:
        """Returns what a trace takes in beside the batch; None if it has to be prepared anew."""
        return ()

    def prepare(self, spec: Callable[[], Any]) -> None:
        """Builds what a trace needs, if the key has changed; ``spec()`` is that of a batch."""
        prepare_model(self.model, self.strategy, spec())
        check_values_alike(self.strategy, self.model)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, batch: Any, *more: Any) -> Any:
        """Computes one batch: an element of a distributed dataset, or a whole global batch."""
        if more:
            raise TypeError(f"A step takes one batch, not {1 + len(more)}. Write step((x, y)).")
        self.settle(lambda: self.function.spec_of(batch))
        if tf.inside_function():
            return self.function(batch)[0]
        return self.call((batch, *self.function.parts_of(batch)))[0]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(self, iterator: Any, steps: int) -> dict[str, Any]:
        """Computes up to ``steps`` batches in one call, which saves the cost of calls.

        Args:
            iterator: ``iter()`` of a distributed dataset, or of a plain dataset of global batches.
            steps: How many, at least 1.

        Returns:
            Logs, with ``"steps"``, how many ran: fewer where the data ended. Losses are means over
            these steps; weights and ``"skipped"`` are sums, the rest is that of the last step.

        Raises:
            DataError: It is another iterator, or for another strategy; or a batch has no rows.
            ValueError: ``steps`` is less than 1.
        """
        return self.looped(iterator, steps)[0]

    def settle(self, spec: Callable[[], Any]) -> None:
        """Takes in what a trace depends on; called before each step."""
        if self._key is not None and self.key() == self._key:
            return
        self.prepare(spec)
        self._key = self.key()
        new = BatchFunction(self._trace, self.strategy)
        self.function = self.functions.setdefault(self._key, new)

    # For what ``compute`` does on replicas ----------------------------------------------------

    def phase(self, replica: Replica) -> Phase:
        """Returns the function of all replicas, as features cut, loop or compile it."""
        for feature in self.features:
            replica = feature.around_replica(replica)
        phase: Phase = functools.partial(self.on_replicas, replica)
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
        return [tf.nest.pack_sequence_as(result, one) for one in zip(*flat, strict=True)]

    def commit(self, state: Sequence[Any], passes: list[Pass], after: Sequence[Any]) -> None:
        """Assigns what layers, draws and metrics have computed, ``after`` all that may fail."""
        if state:
            values = per_replica(self.strategy, [one.state for one in passes])
            self.strategy.run(functools.partial(assign, state, after=after), args=(values,))

    def on_one_device(self) -> Self:
        """Returns the same for the default strategy, with the same variables, for ``look``."""
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
        with short_sums(), standing_at(rows), ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.around_model(rows))
            yield

    # One batch ----------------------------------------------------------------------------------

    def call(self, batch: Batch) -> tuple[dict[str, Any], Tallies]:
        """Runs one batch, with what features do around a call."""
        return self._around()(batch)

    @property
    def watches(self) -> bool:
        """True if a feature does something around a call, which a loop cannot."""
        return self._around() != self._run

    def _around(self) -> Call:
        call: Call = self._run
        for feature in self._callers:
            call = feature.around_call(call)
        return call

    def _run(self, batch: Batch) -> tuple[dict[str, Any], Tallies]:
        logs, vectors = self.function.run(*batch)
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

    def looped(self, iterator: Any, steps: Any) -> tuple[dict[str, Any], Tallies]:
        """Returns what ``run`` does, and the tallies behind it."""
        source, key, split = self._opened(iterator, steps)
        spec = (iterator.cut if isinstance(iterator, ShardIterator) else source).element_spec
        self.settle(lambda: spec)
        zero = tf.zeros([], tf.float64)
        done: Tallies = {name: Tally(None, zero, zero) for name in self.names}
        inside, ran = tf.inside_function(), 0
        while inside or ran < steps:
            if not inside and self.watches:
                with explaining_failures(self.strategy):
                    element = next(source, None)
                    local, offsets = ([], None) if element is None else split(element)
                if local:
                    batch = local[0], [tf.nest.flatten(shard) for shard in local], offsets
                    done, ran = add(done, self.call(batch)[1]), ran + 1
                    continue
            run, most = self._find((self._key, key, tf.type_spec_from_value(source)), split)
            # Ctrl-C is heard between calls.
            asked = steps if inside else min(most, int(steps) - ran, self._length.steps)
            began = time.perf_counter()
            with explaining_failures(self.strategy):
                logs, vectors = run(source, tf.cast(asked, tf.int64), *_vectors(done))
                done, before = self._tallies(vectors), ran
                if inside or ran + asked == steps:  # Reading logs waits for a GPU.
                    return dict(logs), done
                ran = int(logs["steps"])
                self._length.note(ran - before, began)
            if ran - before < asked:
                return dict(logs), done
        return logs_of(done), done

    def _opened(self, iterator: Any, steps: Any) -> tuple[Any, Any, Split]:
        """Returns TensorFlow's iterator, what tells its elements apart, and what cuts one."""
        check_called_from(self.strategy)
        if not isinstance(iterator, (ShardIterator, tf.data.Iterator)):
            raise DataError(
                "step.run takes an iterator, which remembers where it is. Received: "
                f"{type(iterator).__name__}. Write iterator = "
                "iter(tmg.distribute_dataset(dataset, strategy)), then step.run(iterator, steps)."
            )
        if not (tf.is_tensor(steps) and tf.get_static_value(steps) is None):
            check_count("steps", steps, error=ValueError)
        if not isinstance(iterator, ShardIterator):
            return iterator, structure_of(iterator.element_spec), self.function.cut
        if iterator.cut.strategy is not self.strategy:
            raise DataError(
                f"Received: data for {describe(iterator.cut.strategy)}; a step for "
                f"{describe(self.strategy)}. Give distribute_dataset and make_train_step the same "
                "strategy: tmg.distribute_dataset(dataset, strategy)."
            )
        return iterator.source, iterator.cut, iterator.cut.split

    def _find(self, kind: Any, split: Split) -> tuple[Any, float]:
        """Returns the compiled loop for a kind of iterator, and the most steps of a call."""
        for known, run, most in self._loops:  # Specs of dicts compare but do not hash.
            if known == kind:
                return run, most
        count = tf.TensorSpec([], tf.int64)
        vectors = [tf.TensorSpec(_ANY_SHAPE, tf.float64)] * 2 * len(self.names)
        run = self._compile(split).get_concrete_function(kind[-1], count, *vectors)
        # In one call TensorFlow allows a collective of several workers one shape only, and gathered
        # rows differ from batch to batch.
        functions = run.graph.as_graph_def().library.function
        gathers = any(GATHERED in node.name for body in functions for node in body.node_def)
        several = len(local_replicas(self.strategy)) < self.strategy.num_replicas_in_sync
        most = 1 if several and gathers else math.inf
        self._loops.append((kind, run, most))
        return run, most

    def _compile(self, split: Split) -> Any:
        function = self.function

        def step(element: Any, vectors: Sequence[Any]) -> Sequence[Any]:
            _, added = self._trace(function.shards(*split(element)))
            return _vectors(add(self._tallies(vectors), self._tallies(added)))

        def run(source: Any, steps: Any, *vectors: Any) -> Any:
            vectors = _loop_over(source, steps, step, vectors)
            return logs_of(self._tallies(vectors)), vectors

        return tf.function(run, autograph=False)


def _loop_over(source: Any, steps: Any, step: Any, vectors: Sequence[Any]) -> tuple[Any, ...]:
    """Takes each element before its step, which is in a branch: the data may have ended."""

    def body(left: Any, *vectors: Any) -> tuple[Any, ...]:
        optional = source.get_next_as_optional()
        more: Any = optional.has_value()
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
        shape_invariants=[left.shape, *[tf.TensorShape(_ANY_SHAPE)] * len(vectors)],
        parallel_iterations=1,
    )
    return tuple(vectors)


def _vectors(tallies: Tallies) -> tuple[Any, ...]:
    return tuple(vector for tally in tallies.values() for vector in tally[1:])
