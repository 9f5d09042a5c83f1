"""A loop over data inside one ``tf.function``, which ends cleanly where the data ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.steps.rows import GATHERED


def loop_over(source: Any, steps: Any, step: Any, waits: Any, vectors: Sequence[Any]) -> Any:
    """Takes each element before its step, which is in a branch: the data may have ended."""
    no = tf.constant(False)

    def body(left: Any, _: Any, __: Any, *vectors: Any) -> tuple[Any, ...]:
        optional = source.get_next_as_optional()
        more: Any = optional.has_value()
        stop: Any = no
        with tf.device("CPU:0"):
            if waits is not None:
                stop = tf.cond(more, lambda: waits(optional.get_value()), lambda: no)
            more &= ~stop
        vectors = tf.cond(more, lambda: step(optional.get_value(), vectors), lambda: vectors)
        with tf.device("CPU:0"):
            return ((left - 1) * tf.cast(more, tf.int32), stop, optional, *vectors)

    # What decides about going on is on the CPU, and loops keep it there in 32 bits: a step would
    # begin only after a GPU had ended the one before.
    with tf.device("CPU:0"):
        left = tf.cast(tf.minimum(steps, tf.int32.max), tf.int32)
        kind: Any = tf.experimental.Optional
        empty: Any = kind.empty(source.element_spec)
    shapes = [left.shape, no.shape, tf.type_spec_from_value(empty)]
    _, stop, optional, *vectors = tf.while_loop(
        lambda left, *_: left > 0,
        body,
        [left, no, empty, *vectors],
        shape_invariants=[*shapes, *[tf.TensorShape([None])] * len(vectors)],
        parallel_iterations=1,
    )
    return stop, optional, tuple(vectors)


def is_uneven(offsets: Any, replicas: int) -> Any:
    """Returns whether replicas have different numbers of the rows of a batch."""
    with tf.device("CPU:0"):
        counts = offsets[1:] - offsets[:-1]
        return (offsets[-1] >= replicas) & (tf.reduce_max(counts) > tf.reduce_min(counts))


def steps_of(vectors: Sequence[Any]) -> int:
    """Returns how many steps the vectors of a tally are of."""
    return int(vectors[0][0]) if vectors[0].shape[0] else 0


def gathers_rows(run: Any) -> bool:
    """Returns whether a compiled function gathers rows of replicas."""
    functions = run.graph.as_graph_def().library.function
    return any(GATHERED in node.name for body in functions for node in body.node_def)
