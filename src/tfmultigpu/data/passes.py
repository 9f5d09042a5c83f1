"""State that a pass over a dataset leaves behind, on which the order of the next depends."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

__all__ = ["Replay", "read_over", "replay_of"]

# Their iterators create the iterator of their input once, when they are created.
_ONE_INPUT = {
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
_SEVERAL_INPUTS = {"DirectedInterleave", "Zip"}
_SHUFFLES = {"Shuffle", "ShuffleAndRepeat"}
_DRAWS = ("Rng", "Stateful")
_CALL = "StatefulPartitionedCall"  # Calls a function whose operations are examined too.
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


@dataclasses.dataclass(frozen=True)
class Replay:
    """Batches of earlier passes to read again, so that the next pass has its original order.

    Attributes:
        first: Read the first batch of each pass: a shuffle lies below another, and begins when it
            is read.
        whole: Read every batch: the order depends on the content of a cache, on the draws of a
            ``tf.random.Generator``, or on how often a shuffle below ``repeat`` began.
        python: Whether Python code makes elements; its state is unknown.
    """

    first: bool = False
    whole: bool = False
    python: bool = False

    @property
    def batches(self) -> int | None:
        """Number of batches to read of each pass; None for all."""
        return None if self.whole else int(self.first)


def read_over(iterator: Iterator[Any], batches: int | None) -> int:
    """Reads batches of an earlier pass again.

    The pass must be over the training dataset itself. Another dataset made from the same source by
    ``map`` or ``skip`` can have its own state: shuffles in the selector of ``choose_from_datasets``
    restart in it.

    Args:
        iterator: The pass.
        batches: Number of batches, or None for all.

    Returns:
        The number of batches read.
    """
    return sum(1 for _ in itertools.islice(iterator, batches))


def replay_of(dataset: tf.data.Dataset[Any]) -> Replay:
    """Returns the batches of earlier passes that the order of the next depends on."""
    from tensorflow.core.framework import graph_pb2

    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # Has no effect: the graph is not run.
        )
    except tf.errors.OpError:  # A third-party dataset that cannot be serialised.
        return Replay(python=True)
    graph = graph_pb2.GraphDef.FromString(serialized.numpy())
    in_functions = [node.op for function in graph.library.function for node in function.node_def]
    walk = _Walk(graph.node)
    draws = any(op.startswith(_DRAWS) and op != _CALL for op in in_functions)
    return Replay(walk.nested, draws or walk.hidden, any(op in _PYTHON for op in in_functions))


class _Walk:
    """Walk from the last dataset of a pipeline up to its sources.

    Attributes:
        nested: Whether a shuffle that reorders each pass lies below another shuffle.
        hidden: Whether such a shuffle has other passes than the pipeline, as below ``repeat``.
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
        kind = _dataset_type(node)
        if kind is None:
            return
        self._seen.add(node.name)
        if _reshuffles(node):
            self.nested = self.nested or below
        if kind in _SHUFFLES:
            below = True  # A shuffle begins to read its input when it is read.
        if kind in _SEVERAL_INPUTS:
            for one in node.input:
                self._visit(one, below)
        elif kind in _ONE_INPUT or kind in _SHUFFLES:
            self._visit(node.input[0], below)
        # The walk stops at all others, such as cache, repeat and concatenate.


def _dataset_type(node: Any) -> str | None:
    """Returns "Map" for MapDataset and MapDatasetV2; None for a node that is not a dataset."""
    name, _, version = node.op.partition("Dataset")
    is_dataset = node.op != name and (version == "" or version[1:].isdigit())
    return name if is_dataset else None


def _reshuffles(node: Any) -> bool:
    kind = _dataset_type(node)
    if kind == "Random":
        return bool(node.attr["rerandomize_each_iteration"].b)
    return kind in _SHUFFLES and bool(node.attr["reshuffle_each_iteration"].b)
