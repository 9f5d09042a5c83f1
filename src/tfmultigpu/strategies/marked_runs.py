"""Tells replicas in ``strategy.run`` which rows of the global batch they have.

A batch of ``distribute_dataset`` is marked with the offsets of its shards. ``create_strategy``, or
the first such dataset, replaces ``run`` on the strategy object. The new one finds the mark and
keeps it while the replicas run. What runs, and how, does not change; shards of another number of
replicas, of which TensorFlow would drop some, are refused.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import tensorflow as tf

from tfmultigpu.errors import DataError, TfMultiGpuError
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.strategies.topology import describe, local_replicas
from tfmultigpu.types import Function, Graph, Nested, Untyped

# Attributes of the tensors of a batch: the offsets of its shards; that they have all rows; or, if
# shards may be without rows, the tensor that is whole on every replica then.
OFFSETS, WHOLE, COPIES = "_tfmultigpu_offsets", "_tfmultigpu_whole", "_tfmultigpu_copies"


_Result = TypeVar("_Result")


class _Mark(NamedTuple):
    """What is known of the batch that ``run`` was called with."""

    offsets: tf.Tensor | None = None
    whole: tf.Tensor | None = None


class _Eager(threading.local):
    """The marks of the eager runs around this thread, the innermost last."""

    def __init__(self) -> None:
        self.marks = [_Mark()]


class _Running:
    """The marks of the batches that a strategy runs now: threads may call ``run`` at one time.

    Replicas are threads of their own. A traced ``run`` is known by the graph, which they share with
    its caller and with no other thread. An eager one tells each of its replicas.
    """

    def __init__(self) -> None:
        self.by_graph: dict[int, _Mark] = {}
        self.eager = _Eager()

    def mark(self) -> _Mark:
        """Returns the mark of the innermost ``run`` around the caller."""
        if not tf.inside_function():
            return self.eager.marks[-1]
        graph: Graph = tf.compat.v1.get_default_graph()
        while graph is not None:
            if id(graph) in self.by_graph:
                return self.by_graph[id(graph)]
            graph = getattr(graph, "outer_graph", None)  # Of a loop, a branch or a tf.function.
        return _Mark()

    def begin(self, mark: _Mark) -> _Mark | None:
        """Begins a traced ``run``; returns the mark of the one around it in the same graph."""
        key = id(tf.compat.v1.get_default_graph())
        before = self.by_graph.get(key)
        self.by_graph[key] = mark
        return before

    def end(self, before: _Mark | None) -> None:
        """Ends it."""
        key = id(tf.compat.v1.get_default_graph())
        if before is None:
            del self.by_graph[key]
        else:
            self.by_graph[key] = before

    def telling(self, function: Callable[..., _Result], mark: _Mark) -> Callable[..., _Result]:
        """Returns the function of an eager ``run``, which tells the mark to its thread."""
        # TensorFlow traces one of these for all replicas, and would not know it in a wrapper.
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            return function

        def told(*args: object, **kwargs: object) -> _Result:
            self.eager.marks.append(mark)
            try:
                return function(*args, **kwargs)
            finally:
                self.eager.marks.pop()

        return told


def keep_offsets_of_runs(strategy: tf.distribute.Strategy) -> None:
    """Has ``run`` of this strategy object keep the offsets of the batch it is called with."""
    kept = attached(strategy)
    if kept.running is None:
        kept.running = _Running()
        strategy.run = types.MethodType(_run, strategy)


def offsets_of_run(strategy: tf.distribute.Strategy) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Returns the offsets of all shards of the batch that ``strategy.run`` is called with now.

    If one replica has it all, returns a tensor of it instead, as the second of two values.
    """
    running = attached(strategy).running
    if running is None:
        return None, None
    mark: _Mark = running.mark()
    return mark


def _run(strategy: Untyped, function: Function, *args: object, **kwargs: object) -> Nested:
    # AutoGraph converts this, and so the function of the user.
    running = attached(strategy).running
    mark = _mark_of(strategy, args, kwargs) or running.mark()
    if not tf.inside_function():
        return type(strategy).run(strategy, running.telling(function, mark), *args, **kwargs)
    before = running.begin(mark)
    try:
        results = type(strategy).run(strategy, function, *args, **kwargs)
    finally:
        running.end(before)
    return results


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _mark_of(strategy: tf.distribute.Strategy, *arguments: object) -> _Mark | None:
    """Returns the mark of a batch among the arguments of ``run``; None if there is none."""
    leaves = tf.nest.flatten(arguments)
    count = len(local_replicas(strategy))
    fits, offsets, whole = True, None, None
    for leaf in reversed(leaves):  # The first one with a mark counts.
        offsets = getattr(leaf, OFFSETS, offsets)
        if hasattr(leaf, WHOLE):
            whole = leaf
        if isinstance(leaf, tf.distribute.DistributedValues):
            shards = strategy.experimental_local_results(leaf)
            of_another = isinstance(shards[0], tf.distribute.DistributedValues)
            fits = fits and len(shards) == count and not of_another
    if not fits or (whole is not None and count > 1):
        raise DataError(
            "The batch was cut for another strategy, so rows would be lost, or be on every "
            "replica.",
            f"the run of {describe(strategy)}, and a batch for another number of them",
            "Give both the same strategy: tmg.distribute_dataset(dataset, strategy).",
        )
    if count < strategy.num_replicas_in_sync and any(hasattr(leaf, REDUCED) for leaf in leaves):
        raise TfMultiGpuError(
            "An optimizer in strategy.run would add gradients over the workers once more.",
            "gradients of GradientAccumulator.reduce as its arguments",
            "Write after strategy.run: tmg.apply_reduced_gradients(optimizer, gradients, "
            "variables).",
        )
    if offsets is None and whole is None:
        return None
    return _Mark(offsets, whole)
