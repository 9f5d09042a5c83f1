"""Micro-batches: a shard is computed in parts, one after the other, to save memory."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfmultigpu.lists import of_type
from tfmultigpu.steps.features.feature import BoundStep, Feature, RunsParts
from tfmultigpu.steps.features.logical_replicas import LogicalReplicas
from tfmultigpu.steps.values import Pass, Phase, Rows, Shards, Trace
from tfmultigpu.strategies.row_lists import added, is_list, unique
from tfmultigpu.types import Function, Nested, Scalar, Tensor


class MicroBatches(Feature):
    """Cuts each shard into parts, and adds what they give: the result equals the whole shard's.

    ::

        passes = phase(part 0)
        for number in 1, ..., count - 1:
            passes = passes + phase(part number, with the states that the part before has left)

    Attributes:
        count: The largest number of parts; with fewer rows there is one for each.
    """

    def __init__(self, count: int, loop: RunsParts | None = None) -> None:
        self.count = count
        self._loop = loop or one_after_the_other

    def bind(self, step: BoundStep) -> None:
        """Keeps the strategy."""
        self._strategy = step.strategy
        self._dealt = of_type(step.features, LogicalReplicas)

    def on_one_device(self) -> Feature | None:
        """Returns the same if logical replicas are cut, which one device computes alike."""
        if any(not dealt.meets for dealt in self._dealt):
            return MicroBatches(self.count, self._loop)
        return None

    def around_phase(self, phase: Phase) -> Phase:
        """Returns a loop around the phase.

        It is not in the phase: a synchronized layer meets the other replicas by ``merge_call``,
        which a loop inside a replica does not allow.
        """

        def looped(shards: Shards, trace: Trace) -> list[Pass]:
            with tf.device("CPU:0"):  # Decided there, in 32 bits; nothing waits for a GPU.
                largest = tf.reduce_max(tf.stack([_most_rows(rows) for rows in shards.rows]))
                count = tf.minimum(tf.constant(self.count, tf.int64), largest)
                last = tf.cast(count, tf.int32)

            # Before the loop, which must know what it carries when it is traced.
            first = phase(shards.cut(tf.zeros([], tf.int64), count), trace)
            first = list(map(_sum, first))
            begin = self._states_of_replicas(trace, len(first))
            seeds = set(map(id, trace.seeds))

            def body(number: Scalar, *flat: Tensor) -> tuple[Nested, ...]:
                before = _unflat(flat, first)
                states: list[tuple[Tensor, ...]] = []
                for at_first, sums in zip(begin, before, strict=True):
                    values = list(sums.state)
                    for i, variable in enumerate(trace.state):
                        # Seeds are as for the first part: all take their part of the same draws.
                        if id(variable) in seeds:
                            values[i] = at_first[i]
                    states.append(tuple(values))
                part = shards.cut(tf.cast(number, tf.int64), count)
                new = phase(part._replace(state=states), trace)
                return (number + 1, *_flat(list(map(_sum, new, before))))

            flat = self._loop(body, self.count, last, _flat(first))
            return _unflat(flat, first)

        return looped

    def _states_of_replicas(self, trace: Trace, replicas: int) -> list[tuple[Tensor, ...]]:
        """Returns for each replica of this process the values of ``trace.state``."""
        states = self._strategy.run(lambda: [tf.identity(state.value) for state in trace.state])
        if not states:
            return [()] * replicas
        local = map(self._strategy.experimental_local_results, states)
        return list(zip(*local, strict=True))


def _most_rows(rows: Rows) -> Scalar:
    """Returns how many rows a replica has at most; of logical ones any has, on any device."""
    if rows.dealt is None:
        return rows.count
    return -(-rows.total // rows.dealt)


def one_after_the_other(
    body: Function, most: int, count: Scalar, values: Sequence[Tensor]
) -> list[Nested]:
    """Runs ``number, *values = body(number, *values)`` for 1 to ``count`` - 1, in a loop."""
    _, *values = tf.while_loop(
        lambda number, *_: number < count,
        body,
        [tf.ones([], tf.int32), *values],
        parallel_iterations=1,
    )
    return list(values)


def _sum(new: Pass, before: Pass | None = None) -> Pass:
    """Returns the sum of two passes, or a pass by itself, with the states of the new one.

    A list of the rows of a table has each row once.
    """
    sums: list[Tensor] = []
    earlier = [] if before is None else before.addends
    for number, addend in enumerate(new.addends):
        with tf.device(addend.device):  # What is added on a device of its own stays there.
            if before is not None:
                sums.append(added(earlier[number], addend))
            else:
                sums.append(unique(addend) if is_list(addend) else addend)
    return new.with_addends(sums)


def _flat(passes: Sequence[Pass]) -> list[Tensor]:
    flat: list[Tensor] = tf.nest.flatten(_pairs(passes), expand_composites=True)
    return flat


def _pairs(passes: Sequence[Pass]) -> list[Nested]:
    return [(one.addends, one.state) for one in passes]


def _unflat(flat: Sequence[Tensor], like: Sequence[Pass]) -> list[Pass]:
    pairs = tf.nest.pack_sequence_as(_pairs(like), flat, expand_composites=True)
    passes: list[Pass] = []
    for one, (addends, state) in zip(like, pairs, strict=True):
        passes.append(one.with_addends(addends)._replace(state=state))
    return passes
