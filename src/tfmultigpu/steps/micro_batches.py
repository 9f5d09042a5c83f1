"""Micro-batches: a shard is computed in parts, one after the other, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.arguments import check_count
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.steps.features import Feature, Pass, Phase, Replica, Rows, Shards
from tfmultigpu.strategies.collectives import refusing_to_meet


def micro_batch_counts(micro_batches: int | Sequence[int], replicas: int) -> tuple[int, ...]:
    """Returns the number of micro-batches of each replica."""
    if isinstance(micro_batches, np.ndarray):
        micro_batches = micro_batches.tolist()
    several = isinstance(micro_batches, Sequence) and not isinstance(micro_batches, str)
    each: Any = micro_batches if several else [micro_batches] * replicas
    other = "one such number for each replica, of all workers"
    for count in each:
        check_count("micro_batches", count, other=other, error=ValueError)
    if len(each) != replicas:
        raise ValueError(
            "There must be one number of micro-batches for each replica, of all workers. Received: "
            f"micro_batches={micro_batches!r} for {replicas} replica(s). Write "
            "tmg.data.plan_micro_batches(shares, rows_in_memory), or one number for all."
        )
    return tuple(int(count) for count in each)


class MicroBatches(Feature):
    """Cuts each shard into parts, and adds what they give: the result is that of one part."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Takes the number of parts of each replica, of all workers."""
        self._counts = tuple(counts)
        self._alike = len(set(counts)) == 1
        self.loop: Callable[..., list[Any]] = one_after_the_other

    def bind(self, step: Any) -> None:
        """Takes the step, whose trace tells what the loop has to carry."""
        self._step = step

    def around_phase(self, phase: Phase) -> Phase:
        """Returns a loop around the phase, if all replicas have as many parts.

        It is not in the phase: a synchronized layer meets the other replicas by ``merge_call``,
        which a loop inside a replica does not allow.
        """
        if not self._alike:
            return phase

        def looped(shards: Shards) -> list[Pass]:
            with tf.device("CPU:0"):  # Decided there; nothing waits for a GPU.
                largest = tf.reduce_max(tf.stack([rows.count for rows in shards.rows]))
            copies = len(shards.local)

            def part(number: Any, count: Any, states: Any) -> list[Pass]:
                return phase(shards.cut(number, count)._replace(state=states))

            return self._loop(part, self._counts[0], largest, copies)

        return looped

    def around_replica(self, replica: Replica) -> Replica:
        """Returns a loop in the replica, if each has its own number of parts: none waits."""
        if self._alike:
            return replica
        synchronised = TfMultiGpuError(
            "A layer synchronises the replicas whenever it is called, such as "
            "BatchNormalization(synchronized=True), and replicas with different numbers of "
            f"micro-batches do not meet. Received: micro_batches={self._counts}. "
            f"Give all the same number, micro_batches={max(self._counts)}, or take a layer that "
            "needs no other replica, such as GroupNormalization."
        )

        def looped(shard: Any, rows: Rows, state: Any, factor: Any, total: Any) -> Pass:
            context = tf.distribute.get_replica_context()
            own = self._counts[tf.get_static_value(context.replica_id_in_sync_group)]
            shards = Shards([shard], [rows], [state], factor, total)

            def part(number: Any, count: Any, states: Any) -> list[Pass]:
                cut = shards.cut(number, count)
                with refusing_to_meet(synchronised):
                    return [replica(cut.local[0], cut.rows[0], states[0], factor, total)]

            return self._loop(part, own, rows.count, 1)[0]

        return looped

    def _loop(
        self, part: Callable[..., list[Pass]], most: int, rows: Any, copies: int
    ) -> list[Pass]:
        """Adds the parts of some shards, up to ``most``; with fewer rows, one for each row."""
        trace = self._step.trace
        with tf.device("CPU:0"):
            count = tf.minimum(tf.cast(most, tf.int64), rows)
        # A loop must know what it carries before it is traced. So one part is traced first, in a
        # graph that is thrown away; its number is one that nothing can know.
        with _compat.scratch_graph():
            hide = tf.compat.v1.placeholder_with_default
            unknown = [hide(tf.constant(value, tf.int64), []) for value in (0, 1)]
            like = part(*unknown, [()] * copies)
        begin = self._begin(copies)
        first = [
            each.with_addends([_zeros(tensor) for tensor in each.addends])._replace(state=state)
            for each, state in zip(like, begin, strict=True)
        ]
        alike = [id(variable) in trace.alike for variable in trace.state]

        def body(number: Any, *flat: Any) -> tuple[Any, ...]:
            before = _unflat(flat, like)
            # Some begin as for the first part, as seeds: all take their part of the same draws.
            states = [
                tuple(b if a else s for a, b, s in zip(alike, old, each.state, strict=True))
                for old, each in zip(begin, before, strict=True)
            ]
            new = part(tf.cast(number, tf.int64), count, states)
            sums = [
                n.with_addends([_sum(a, b) for a, b in zip(o.addends, n.addends, strict=True)])
                for o, n in zip(before, new, strict=True)
            ]
            return (number + 1, *_flat(sums))

        last = tf.cast(count, tf.int32)  # In 32 bits, which GPUs keep where loops are decided.
        return _unflat(self.loop(body, most, last, _flat(first)), like)

    def _begin(self, copies: int) -> list[tuple[Any, ...]]:
        """Returns the states before the first part, on each replica of this process."""

        def read() -> list[Any]:
            return [tf.identity(state.value) for state in self._step.trace.state]

        if tf.distribute.get_replica_context() is not None and tf.distribute.has_strategy():
            return [tuple(read())]
        strategy = self._step.strategy
        local = [strategy.experimental_local_results(value) for value in strategy.run(read)]
        return [tuple(each[number] for each in local) for number in range(copies)]


def one_after_the_other(
    body: Callable[..., Any], most: int, count: Any, values: Sequence[Any]
) -> list[Any]:
    """Runs ``number, *values = body(number, *values)`` in a loop, for numbers below a count."""
    _, *values = tf.while_loop(
        lambda number, *_: number < count,
        body,
        [tf.zeros([], tf.int32), *values],
        parallel_iterations=1,
    )
    return list(values)


def _sum(before: Any, new: Any) -> Any:
    with tf.device(new.device):  # What is added on a device of its own stays there.
        return before + new


def _zeros(like: Any) -> Any:
    # TensorFlow carries a tensor through a loop on the device that it comes from.
    with tf.device(like.device):
        return tf.zeros(like.shape, like.dtype)


def _flat(passes: Sequence[Pass]) -> list[Any]:
    return [tensor for one in passes for tensor in (*one.addends, *one.state)]


def _unflat(flat: Sequence[Any], like: Sequence[Pass]) -> list[Pass]:
    turn = iter(flat)
    passes = []
    for one in like:
        addends = [next(turn) for _ in one.addends]
        state = tuple([next(turn) for _ in one.state])
        passes.append(one.with_addends(addends)._replace(state=state))
    return passes
