"""Many steps inside one call, ending cleanly where the data ends."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.element_layout import iterator_of, structure_of
from tfmultigpu.errors import DataError
from tfmultigpu.losses.objective import MeanKey
from tfmultigpu.steps.batch_function import BatchFunction, Shards, ShardSource, check_called_from
from tfmultigpu.steps.call_lengths import CallLength
from tfmultigpu.steps.failures import explaining_failures
from tfmultigpu.steps.row_gathering import GATHERED
from tfmultigpu.strategies.topology import describe, local_replicas

__all__ = ["TERMS", "LastKey", "MultiStep"]

# The terms of the loss in the logs of a step, for verification: sums, then weights.
TERMS = "terms"
_LAST = ("gradient_norm", "loss_scale")
_ROOM = 8


class LastKey(str):
    """Key of a log that is that of the last step, and not added up or averaged over steps."""


class MultiStep:
    """Runs a step over an iterator, up to a number of times, as one ``tf.function``.

    Long calls of that function are cut, because Ctrl-C is heard only between them.

    Attributes:
        step: The step, as a function of shards that can be called inside a ``tf.function``.
    """

    def __init__(self, step: BatchFunction, *, wide: bool = False) -> None:
        """Takes the step.

        Args:
            step: The step.
            wide: Whether to return sums in float64. Added up over calls these do not depend on how
                many steps each call took, which depends on clocks and on where a run resumed.
        """
        self.step = step
        self._sums_in = tf.float64 if wide else tf.float32
        self._compiled: list[tuple[Any, Any, float]] = []
        self._length = CallLength(step.strategy)

    def batch_spec(self, iterator: Any) -> Any:
        """Returns the types of the global batches of an iterator, None where it is none."""
        if isinstance(iterator, ShardSource):
            return iterator.batch_spec
        return getattr(iterator, "element_spec", None)

    def __call__(
        self, iterator: Any, steps: int, carry: Any = None
    ) -> tuple[dict[str, Any], Any, Any]:
        """Runs up to ``steps`` batches.

        Args:
            iterator: ``iter()`` of a distributed dataset, or of a plain dataset of global batches.
            steps: How many, at least 1.
            carry: What an earlier call returned, whose steps count as if they were of this one.

        Returns:
            The logs; what a later call can carry on from; the terms of the last step's loss.

            In the logs are ``"steps"``, how many ran, and the step's logs put together. Weights and
            ``"skipped"`` are sums. The loss of an output is its mean by its own weight; ``"loss"``
            is these times their loss weights, and what else is in it, or all of it where there is a
            single output, is the mean by ``"weight"``. The rest is that of the last step.

        Raises:
            DataError: It is not such an iterator, or one made for another strategy; or a batch has
                no rows.
            ValueError: ``steps`` is less than 1.
        """
        source, key, split = self.check(iterator, steps)
        run, most = self._find((key, tf.type_spec_from_value(source)), split)
        with explaining_failures(self.step.strategy):
            logs = self._in_calls(run, most, source, steps, carry or _nothing())
        return logs, logs.pop("carry"), logs.pop(TERMS)

    def _in_calls(
        self, run: Any, most: float, source: Any, steps: Any, carry: Any
    ) -> dict[str, Any]:
        left = None if tf.inside_function() else tf.get_static_value(steps)
        while left is not None and (asked := min(most, self._length.most(int(left)))) < left:
            with self._length.measuring() as note:
                logs = dict(run(source, tf.constant(asked, tf.int64), *carry))
                done, _, _ = after = logs["carry"]
                ran = int(done) - int(carry[0])  # Reading it waits for the steps.
                note(ran)
            if ran < asked:
                return logs
            carry, left = after, left - ran
        return dict(run(source, tf.cast(steps if left is None else left, tf.int64), *carry))

    def check(self, iterator: Any, steps: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Checks what ``__call__`` is given.

        Returns:
            TensorFlow's iterator, what distinguishes its elements, and what makes shards of one.

        Raises:
            DataError: As ``__call__``.
            ValueError: As ``__call__``.
        """
        check_called_from(self.step.strategy)
        if not isinstance(iterator, (ShardSource, tf.data.Iterator)):
            raise DataError(
                "step.run takes an iterator, which remembers where it is between calls. Received: "
                f"{type(iterator).__name__}. Write iterator = "
                "iter(tmg.distribute_dataset(dataset, strategy)), then step.run(iterator, steps)."
            )
        if not isinstance(steps, numbers.Number) and not tf.is_tensor(steps):
            raise ValueError(
                f"steps is a whole number, at least 1. Received: steps={type(steps).__name__}."
            )
        known: Any = steps if isinstance(steps, numbers.Number) else tf.get_static_value(steps)
        if known is not None and (known < 1 or int(known) != known):
            raise ValueError(f"steps is a whole number, at least 1. Received: steps={known}.")
        if isinstance(iterator, ShardSource):
            if iterator.strategy is not self.step.strategy:
                raise DataError(
                    "The data was distributed for another strategy than the step was made for. "
                    f"Received: data for {describe(iterator.strategy)}; a step for "
                    f"{describe(self.step.strategy)}. Give distribute_dataset and make_train_step "
                    "the same strategy: tmg.distribute_dataset(dataset, strategy)."
                )
            return iterator.source, iterator.split_key, iterator.split
        return iterator, structure_of(iterator.element_spec), self._cut

    def take(self, iterator: Any) -> tuple[Shards, Any] | None:
        """Takes the next batch, for a look at it before a step does.

        Returns:
            Its shards, and an iterator that yields this batch only; None if the data has ended.
        """
        source, _, split = self.check(iterator, 1)
        with explaining_failures(self.step.strategy):
            element = next(source, None)
            if element is None:
                return None
            local, offsets = split(element)
        if isinstance(iterator, ShardSource):
            return Shards(local, offsets), iterator.only(element)
        return Shards(local, offsets), iterator_of(element, source.element_spec)

    def _find(self, kind: Any, split: Callable[[Any], Any]) -> tuple[Any, float]:
        """Returns the compiled function for a kind of iterator, and the most steps of a call."""
        for known, run, most in self._compiled:  # Specs of dicts compare but do not hash.
            if known == kind:
                return run, most
        scalar = tf.TensorSpec([], tf.int64)
        vector = tf.TensorSpec([None], tf.float64)
        run = self._compile(split).get_concrete_function(kind[1], scalar, scalar, vector, vector)
        # In one call TensorFlow allows a collective of several workers one shape only, and gathered
        # rows differ from batch to batch.
        several = len(local_replicas(self.step.strategy)) < self.step.strategy.num_replicas_in_sync
        most = 1 if several and _gathers_rows(run) else math.inf
        self._compiled.append((kind, run, most))
        return run, most

    def _cut(self, element: Any) -> Any:
        return self.step.cut(element)[:2]

    def _compile(self, split: Callable[[Any], Any]) -> Any:
        names: list[str] = []
        last_names: list[str] = []

        def one(element: Any, sums: Any, last: Any) -> tuple[Any, Any]:
            local, offsets = split(element)
            logs = self.step.function(Shards(local, offsets))
            terms = tf.cast(logs.pop(TERMS, []), tf.float64)
            last_names[:] = [*_LAST, *(name for name in logs if isinstance(name, LastKey))]
            names[:] = [name for name in logs if name not in last_names]
            wide = {name: tf.cast(value, tf.float64) for name, value in logs.items()}
            added = [wide["loss"]] + [_addend(name, wide) for name in names]
            # How many there are is known only here. There is room for a few; else make some.
            added += [tf.zeros([], tf.float64)] * (_ROOM - len(added))
            if len(added) > _ROOM:
                sums = tf.pad(sums, [[0, len(added) - tf.size(sums)]])
            ends = [tf.cast(logs.get(name, 0.0), tf.float64) for name in last_names]
            return sums + tf.stack(added), tf.concat([tf.stack(ends), terms], 0)

        def run(source: Any, steps: Any, before: Any, sums: Any, last: Any) -> dict[str, Any]:
            done, sums, last = _loop(source, steps, one, sums, last)
            done += before
            logs = _logs(done, sums, last, names, last_names, self._sums_in)
            return {**logs, "carry": (done, sums, last), TERMS: last[len(last_names) :]}

        return tf.function(run, autograph=False)


def _gathers_rows(run: Any) -> bool:
    functions = run.graph.as_graph_def().library.function
    return any(GATHERED in node.name for one in functions for node in one.node_def)


def _loop(source: Any, steps: Any, one: Any, sums: Any, last: Any) -> Any:
    """Takes each element before its step, which is in a branch: the data may have ended."""
    # What decides about going on is on the CPU, and loops keep it there in 32 bits: a step would
    # begin only after a GPU had ended the one before.
    with tf.device("CPU:0"):
        left = tf.cast(tf.minimum(steps, tf.int32.max), tf.int32)

    def body(left: Any, done: Any, sums: Any, last: Any) -> tuple[Any, ...]:
        optional = source.get_next_as_optional()
        more = optional.has_value()
        sums, last = tf.cond(
            more, lambda: one(optional.get_value(), sums, last), lambda: (sums, last)
        )
        with tf.device("CPU:0"):
            ran = tf.cast(more, tf.int32)
            return (left - 1) * ran, done + ran, sums, last

    _, done, sums, last = tf.while_loop(
        lambda left, *_: left > 0,
        body,
        [left, tf.zeros([], tf.int32), sums, last],
        shape_invariants=[left.shape, left.shape, *[tf.TensorShape([None])] * 2],
        parallel_iterations=1,
    )
    return tf.cast(done, tf.int64), sums, last


def _addend(name: str, logs: dict[str, Any]) -> Any:
    """Returns what a step adds to a log: the sum behind a mean, the loss without its outputs."""
    if isinstance(name, MeanKey):
        return logs[name.sum] if name.sum else logs[name] * logs[name.weight]
    if name != "loss":
        return logs[name]
    return (logs[name] - _of_outputs(logs)) * logs["weight"]


def _of_outputs(logs: dict[str, Any]) -> Any:
    """The part of the loss that outputs with a loss of their own make up."""
    outputs = [key for key in logs if isinstance(key, MeanKey) and key.factor is not None]
    return sum(key.factor * logs[key] for key in outputs)


def _logs(
    done: Any, sums: Any, last: Any, names: list[str], last_names: list[str], sums_in: Any
) -> dict[str, Any]:
    if len(names) + 1 > _ROOM:  # After no step there is still no room.
        sums = tf.pad(sums, [[0, len(names) + 1 - tf.size(sums)]])
    if len(last_names) > len(_LAST):
        last = tf.pad(last, [[0, tf.maximum(len(last_names) - tf.size(last), 0)]])
    plain, *values = [sums[i] for i in range(len(names) + 1)]
    logs = dict(zip(names, values, strict=True))
    for name in names:
        if isinstance(name, MeanKey):
            logs[name] = tf.math.divide_no_nan(logs[name], logs[name.weight])
    weight = logs["weight"]
    loss = logs["loss"] / tf.where(weight > 0, weight, 1.0) + _of_outputs(logs)
    # Without weight there is still regularisation, which is in every step's loss.
    logs["loss"] = tf.where(weight > 0, loss, plain / tf.cast(done, tf.float64))
    logs = {name: tf.cast(value, sums_in) for name, value in logs.items()}
    # Under a `LastKey` there may be a count, for which float32 is too small.
    ends = {
        name: tf.cast(last[i], sums_in if isinstance(name, LastKey) else tf.float32)
        for i, name in enumerate(last_names)
    }
    return {"steps": done, **logs, **ends}


@functools.cache
def _nothing() -> tuple[Any, Any, Any]:
    """Returns the carried state before the first call."""
    with tf.init_scope(), tf.device("CPU:0"):
        # In float64: a sum of many in float32 drifts, and stops to count rows at 2**24.
        sums = tf.zeros([_ROOM], tf.float64)
        return tf.constant(0, tf.int64), sums, tf.zeros([len(_LAST)], tf.float64)
