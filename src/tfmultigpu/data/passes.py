"""What a pass over a dataset leaves behind, which decides about the order of the next."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

__all__ = ["Replay", "read_over", "replay_of"]

# Their iterators make that of their input when they are made, and make it once.
_PASSED_ON = {
    "AssertCardinality",
    "Batch",
    "Filter",
    "FlatMap",
    "Interleave",
    "Map",
    "MapAndBatch",
    "Options",
    "PaddedBatch",
    "ParallelBatch",
    "ParallelFilter",
    "ParallelInterleave",
    "ParallelMap",
    "Prefetch",
    "Rebatch",
    "Scan",
    "Shard",
    "Skip",
    "Take",
    "TakeWhile",
    "Unbatch",
    "Window",
}
_TOGETHER = {"DirectedInterleave", "Zip"}
_SHUFFLES = {"Shuffle", "ShuffleAndRepeat"}
_DRAWS = ("Rng", "Stateful")
_CALL = "StatefulPartitionedCall"  # Of a function, whose operations are looked at too.
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


@dataclasses.dataclass(frozen=True)
class Replay:
    """What must be read of passes that are over, so that the next has the order it would have had.

    Attributes:
        first: The first batch of each: a shuffle lies below another, and begins when it is read.
        whole: All of each: what a cache keeps, what a ``tf.random.Generator`` draws or how often a
            shuffle below ``repeat`` began depends on it.
        python: Whether Python makes elements, whose state nobody knows.
    """

    first: bool = False
    whole: bool = False
    python: bool = False

    @property
    def batches(self) -> int | None:
        """How many batches of a pass must be read; None for all."""
        return None if self.whole else int(self.first)


def read_over(iterator: Iterator[Any], batches: int | None) -> int:
    """Reads batches of a pass that is over; it must be a pass over what is trained on.

    Another dataset made of the same one, with ``map`` or ``skip``, can have a state of its own:
    shuffles in the selector of ``choose_from_datasets`` begin anew in it.

    Args:
        iterator: The pass.
        batches: How many, or None for all.

    Returns:
        How many there were.
    """
    return sum(1 for _ in itertools.islice(iterator, batches))


def replay_of(dataset: tf.data.Dataset[Any]) -> Replay:
    """Returns what must be read of passes over a dataset."""
    from tensorflow.core.framework import graph_pb2

    try:
        written = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # Does not matter, since the graph is not run.
        )
    except tf.errors.OpError:  # A dataset of others that cannot say what it is.
        return Replay(python=True)
    graph = graph_pb2.GraphDef.FromString(written.numpy())
    in_functions = [node.op for function in graph.library.function for node in function.node_def]
    walk = _Walk(graph.node)
    draws = any(op.startswith(_DRAWS) and op != _CALL for op in in_functions)
    return Replay(walk.nested, draws or walk.hidden, any(op in _PYTHON for op in in_functions))


class _Walk:
    """A way from the last dataset of a pipeline up to its sources.

    Attributes:
        nested: Whether a shuffle of its own order in each pass lies below another.
        hidden: Whether one lies where its passes are not those of the whole.
    """

    def __init__(self, nodes: Iterable[Any]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._seen: set[str] = set()
        self.nested = self.hidden = False
        for node in self._nodes.values():
            if node.op == "_Retval":
                self._visit(node.input[0], below=False)
        reshuffled = {name for name, node in self._nodes.items() if _reshuffles(node)}
        self.hidden = bool(reshuffled - self._seen)

    def _visit(self, name: str, below: bool) -> None:
        node = self._nodes[name.split(":")[0].lstrip("^")]
        kind = _kind(node)
        if kind is None:
            return
        self._seen.add(node.name)
        if _reshuffles(node):
            self.nested = self.nested or below
        if kind in _SHUFFLES:
            below = True  # It begins to read its input when it is read.
        if kind in _TOGETHER:
            for one in node.input:
                self._visit(one, below)
        elif kind in _PASSED_ON or kind in _SHUFFLES:
            self._visit(node.input[0], below)
        # Of all others, such as cache, repeat and concatenate, what is above stays unseen.


def _kind(node: Any) -> str | None:
    """Map of MapDataset and MapDatasetV2; None of what is no dataset."""
    name, _, version = node.op.partition("Dataset")
    is_dataset = node.op != name and (version == "" or version[1:].isdigit())
    return name if is_dataset else None


def _reshuffles(node: Any) -> bool:
    kind = _kind(node)
    if kind == "Random":
        return bool(node.attr["rerandomize_each_iteration"].b)
    return kind in _SHUFFLES and bool(node.attr["reshuffle_each_iteration"].b)
