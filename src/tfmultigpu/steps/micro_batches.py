"""Micro-batches: a shard is computed in parts, one after the other, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.steps.features import Feature, Pass, Phase, Shards


class MicroBatches(Feature):
    """Cuts each shard into parts, and adds what they give: the result is that of one part.

    Attributes:
        count: The largest number of parts; with fewer rows there is one for each.
        loop: Runs the parts after the first, one after the other.
    """

    def __init__(self, count: int) -> None:
        """Takes the number of parts."""
        self.count = count
        self.loop: Callable[..., list[Any]] = one_after_the_other

    def bind(self, step: Any) -> None:
        """Takes the step, whose trace tells what the loop has to carry."""
        self._step = step

    def around_phase(self, phase: Phase) -> Phase:
        """Returns a loop around the phase.

        It is not in the phase: a synchronized layer meets the other replicas by ``merge_call``,
        which a loop inside a replica does not allow.
        """

        def looped(shards: Shards) -> list[Pass]:
            trace, strategy = self._step.trace, self._step.strategy
            with tf.device("CPU:0"):  # Decided there, in 32 bits; nothing waits for a GPU.
                largest = tf.reduce_max(tf.stack([rows.count for rows in shards.rows]))
                count = tf.minimum(tf.constant(self.count, tf.int64), largest)
                last = tf.cast(count, tf.int32)
            # Before the loop, which must know what it carries when it is traced.
            first = phase(shards.cut(tf.zeros([], tf.int64), count))
            states = strategy.run(lambda: [tf.identity(state.value) for state in trace.state])
            local = [strategy.experimental_local_results(state) for state in states]
            begin = [tuple(each[copy] for each in local) for copy in range(len(first))]
            alike = [id(variable) in trace.alike for variable in trace.state]

            def body(number: Any, *flat: Any) -> tuple[Any, ...]:
                before = _unflat(flat, first)
                # Some begin as for the first part, as seeds: all take their part of the same draws.
                states = [
                    tuple(b if a else s for a, b, s in zip(alike, old, each.state, strict=True))
                    for old, each in zip(begin, before, strict=True)
                ]
                part = shards.cut(tf.cast(number, tf.int64), count)
                new = phase(part._replace(state=states))
                sums = [
                    n.with_addends([_sum(a, b) for a, b in zip(o.addends, n.addends, strict=True)])
                    for o, n in zip(before, new, strict=True)
                ]
                return (number + 1, *tf.nest.flatten(_pairs(sums)))

            return _unflat(self.loop(body, self.count, last, tf.nest.flatten(_pairs(first))), first)

        return looped


def one_after_the_other(
    body: Callable[..., Any], most: int, count: Any, values: Sequence[Any]
) -> list[Any]:
    """Runs ``number, *values = body(number, *values)`` for 1 to ``count`` - 1, in a loop."""
    _, *values = tf.while_loop(
        lambda number, *_: number < count,
        body,
        [tf.ones([], tf.int32), *values],
        parallel_iterations=1,
    )
    return list(values)


def _sum(before: Any, new: Any) -> Any:
    with tf.device(new.device):  # What is added on a device of its own stays there.
        return before + new


def _pairs(passes: Sequence[Pass]) -> list[Any]:
    return [(one.addends, one.state) for one in passes]


def _unflat(flat: Sequence[Any], like: Sequence[Pass]) -> list[Pass]:
    pairs = tf.nest.pack_sequence_as(_pairs(like), flat)
    return [p.with_addends(a)._replace(state=s) for p, (a, s) in zip(like, pairs, strict=True)]
