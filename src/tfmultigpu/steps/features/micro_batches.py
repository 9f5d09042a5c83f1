"""Micro-batches: a shard is computed in parts, one after the other, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.steps.features.feature import BoundStep, Feature, Loop
from tfmultigpu.steps.values import Pass, Phase, Shards, Trace
from tfmultigpu.strategies.row_lists import is_list, joined, unique
from tfmultigpu.types import Scalar


class MicroBatches(Feature):
    """Cuts each shard into parts, and adds what they give: the result equals the whole shard's.

    ::

        passes = phase(part 0)
        for number in 1, ..., count - 1:
            passes = passes + phase(part number, with the states that the part before has left)

    Attributes:
        count: The largest number of parts; with fewer rows there is one for each.
    """

    def __init__(self, count: int, loop: Loop | None = None) -> None:
        self.count = count
        self._loop = loop or one_after_the_other

    def bind(self, step: BoundStep) -> None:
        """Keeps the strategy."""
        self._strategy = step.strategy

    def around_phase(self, phase: Phase) -> Phase:
        """Returns a loop around the phase.

        It is not in the phase: a synchronized layer meets the other replicas by ``merge_call``,
        which a loop inside a replica does not allow.
        """

        def looped(shards: Shards, trace: Trace) -> list[Pass]:
            with tf.device("CPU:0"):  # Decided there, in 32 bits; nothing waits for a GPU.
                largest = tf.reduce_max(tf.stack([rows.count for rows in shards.rows]))
                count = tf.minimum(tf.constant(self.count, tf.int64), largest)
                last = tf.cast(count, tf.int32)

            # Before the loop, which must know what it carries when it is traced.
            first = phase(shards.cut(tf.zeros([], tf.int64), count), trace)
            first = [_sum(None, one) for one in first]
            begin = self._states_of_replicas(trace, len(first))
            seeds = {id(variable) for variable in trace.seeds}
            is_seed = [id(variable) in seeds for variable in trace.state]

            def body(number: Scalar, *flat: Any) -> tuple[Any, ...]:
                before = _unflat(flat, first)
                states: list[tuple[Any, ...]] = []
                for at_first, one in zip(begin, before, strict=True):
                    # Seeds are as for the first part: all take their part of the same draws.
                    choices = zip(is_seed, at_first, one.state, strict=True)
                    states.append(tuple(old if seed else new for seed, old, new in choices))
                part = shards.cut(tf.cast(number, tf.int64), count)
                new = phase(part._replace(state=states), trace)
                sums = [_sum(*pair) for pair in zip(before, new, strict=True)]
                return (number + 1, *_flat(sums))

            flat = self._loop(body, self.count, last, _flat(first))
            return _unflat(flat, first)

        return looped

    def _states_of_replicas(self, trace: Trace, replicas: int) -> list[tuple[Any, ...]]:
        """Returns for each replica of this process the values of ``trace.state``."""
        states = self._strategy.run(lambda: [tf.identity(one.value) for one in trace.state])
        local = [self._strategy.experimental_local_results(state) for state in states]
        return [tuple(each[number] for each in local) for number in range(replicas)]


def one_after_the_other(
    body: Callable[..., Any], most: int, count: Scalar, values: Sequence[Any]
) -> list[Any]:
    """Runs ``number, *values = body(number, *values)`` for 1 to ``count`` - 1, in a loop."""
    _, *values = tf.while_loop(
        lambda number, *_: number < count,
        body,
        [tf.ones([], tf.int32), *values],
        parallel_iterations=1,
    )
    return list(values)


def _sum(before: Pass | None, new: Pass) -> Pass:
    """Returns the sum of two passes, with the states of the second; of the second alone for None.

    A list of the rows of a table has each row once, so it is never longer than the table.
    """
    sums: list[Any] = []
    old = [None] * len(new.addends) if before is None else before.addends
    for one, addend in zip(old, new.addends, strict=True):
        with tf.device(addend.device):  # What is added on a device of its own stays there.
            if is_list(addend):
                sums.append(unique(addend if one is None else joined([one, addend])))
            else:
                sums.append(addend if one is None else one + addend)
    return new.with_addends(sums)


def _flat(passes: Sequence[Pass]) -> list[Any]:
    flat: list[Any] = tf.nest.flatten(_pairs(passes), expand_composites=True)
    return flat


def _pairs(passes: Sequence[Pass]) -> list[Any]:
    return [(one.addends, one.state) for one in passes]


def _unflat(flat: Sequence[Any], like: Sequence[Pass]) -> list[Pass]:
    pairs = tf.nest.pack_sequence_as(_pairs(like), flat, expand_composites=True)
    passes: list[Pass] = []
    for one, (addends, state) in zip(like, pairs, strict=True):
        passes.append(one.with_addends(addends)._replace(state=state))
    return passes
