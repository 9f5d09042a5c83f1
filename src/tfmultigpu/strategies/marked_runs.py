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
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfmultigpu.errors import DataError, TfMultiGpuError
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.collectives import REDUCED
from tfmultigpu.strategies.topology import describe, local_replicas
from tfmultigpu.types import Function, Nested

# Attributes of the tensors of a batch: the offsets of its shards; that they have all rows; or, if
# shards may be without rows, the tensor that is whole on every replica then.
OFFSETS, WHOLE, COPIES = "_tfmultigpu_offsets", "_tfmultigpu_whole", "_tfmultigpu_copies"


_Result = TypeVar("_Result")


class Mark(NamedTuple):
    """What is known of the batches that ``run`` is called with.

    Attributes:
        offsets: The offsets of all shards of the first batch; None if none is known.
        whole: A tensor of it instead, if one replica has it all.
        others: The offsets of the batches after it.
    """

    offsets: tf.Tensor | None = None
    whole: tf.Tensor | None = None
    others: tuple[tf.Tensor, ...] = ()


class _Eager(threading.local):
    """The marks of the eager runs around this thread, the innermost last."""

    def __init__(self) -> None:
        self.marks = [Mark()]


class _Running:
    """The marks of the batches that a strategy runs now: threads may call ``run`` at one time.

    Replicas are threads of their own. A traced ``run`` is known by the graph, which they share with
    its caller and with no other thread. An eager one tells each of its replicas.
    """

    def __init__(self) -> None:
        self.by_graph: dict[int, Mark] = {}
        self.eager = _Eager()

    def mark(self) -> Mark:
        """Returns the mark of the innermost ``run`` around the caller."""
        if not tf.inside_function():
            return self.eager.marks[-1]
        graph: Any = tf.compat.v1.get_default_graph()
        while graph is not None:
            if id(graph) in self.by_graph:
                return self.by_graph[id(graph)]
            graph = getattr(graph, "outer_graph", None)  # Of a loop, a branch or a tf.function.
        return Mark()

    def begin(self, mark: Mark) -> Mark | None:
        """Begins a traced ``run``; returns the mark of the one around it in the same graph."""
        key = id(tf.compat.v1.get_default_graph())
        before = self.by_graph.get(key)
        self.by_graph[key] = mark
        return before

    def end(self, before: Mark | None) -> None:
        """Ends it."""
        key = id(tf.compat.v1.get_default_graph())
        if before is None:
            del self.by_graph[key]
        else:
            self.by_graph[key] = before

    def telling(self, function: Callable[..., _Result], mark: Mark) -> Callable[..., _Result]:
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


def mark_of_run(strategy: tf.distribute.Strategy) -> Mark:
    """Returns what is known of the batches that ``strategy.run`` is called with now."""
    running = attached(strategy).running
    return Mark() if running is None else running.mark()


def _run(strategy: Any, function: Function, *args: object, **kwargs: object) -> Nested:
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
def _mark_of(strategy: tf.distribute.Strategy, *arguments: object) -> Mark | None:
    """Returns the mark of a batch among the arguments of ``run``; None if there is none."""
    leaves = tf.nest.flatten(arguments)
    count = len(local_replicas(strategy))
    fits, whole = True, None
    offsets: dict[int, tf.Tensor] = {}
    for leaf in leaves:
        if hasattr(leaf, OFFSETS):
            offsets.setdefault(id(getattr(leaf, OFFSETS)), getattr(leaf, OFFSETS))
        if whole is None and hasattr(leaf, WHOLE):
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
            "Write after strategy.run: tmg.accumulation.apply_reduced_gradients(optimizer, "
            "gradients, variables).",
        )
    if not offsets:
        return None if whole is None else Mark(whole=whole)
    first, *others = offsets.values()
    return Mark(first, whole, tuple(others))
