"""Passes over a dataset: their numbers, and how the next one gets its original order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.types import Batches, Scalar

# An iterator of these creates the iterators of their inputs once, when it is created itself.
_FORWARD = (
    "AssertCardinality Batch DirectedInterleave Filter FlatMap Interleave Map MapAndBatch Options "
    "PaddedBatch ParallelBatch ParallelFilter ParallelInterleave ParallelMap Prefetch Rebatch Scan "
    "Shard Skip Take TakeWhile Unbatch Window Zip"
)
_SHUFFLES = {"Shuffle", "ShuffleAndRepeat"}


class SharedNumber:
    """An int64 number that ``tf.data`` and the program read and write; -1 at first.

    Unlike a variable, it is the same object inside and outside the scope of a strategy.
    """

    def __init__(self) -> None:
        self._table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def read(self) -> Scalar:
        """Returns the number, a scalar."""
        return self._table.lookup(tf.constant(0, tf.int64))

    def write(self, number: Scalar) -> Any:
        """Stores a number; returns the operation, in a graph."""
        return self._table.insert(tf.constant(0, tf.int64), tf.cast(number, tf.int64))


def read_over(iterator: Iterator[object], batches: int | None) -> int:
    """Reads up to a number of batches, None for all; returns how many there were."""
    count = 0
    for _ in itertools.islice(iterator, batches):
        count += 1
    return count


def begin_unread(graph: Any) -> bool:
    """Returns whether the order of a pass depends only on how many passes began before it.

    A dataset that reshuffles counts its passes. Below another shuffle, ``cache``, ``repeat`` or
    ``concatenate`` it counts something else, and so does a ``tf.random.Generator``.

    Args:
        graph: The graph of the dataset.
    """
    for function in graph.library.function:
        for node in function.node_def:
            is_call = node.op == "StatefulPartitionedCall"  # Its function is in the library too.
            if node.op.startswith(("Rng", "Stateful")) and not is_call:
                return False
    nodes = {node.name: node for node in graph.node}
    pending = [node.input[0] for node in graph.node if node.op == "_Retval"]
    reached = set()
    while pending:
        node = nodes[pending.pop().split(":")[0].lstrip("^")]
        reached.add(node.name)
        if _dataset_type(node) in _FORWARD.split():
            pending += node.input
    return reached >= {node.name for node in graph.node if _reshuffles(node)}


def shuffles_without_seed(graph: Any) -> int:
    """Returns how many shuffles in the graph of a dataset have another order in each process."""
    nodes = {node.name: node for node in graph.node}
    count = 0
    for node in graph.node:
        if _dataset_type(node) in _SHUFFLES:
            seeds = [nodes[name.split(":")[0]].attr["value"].tensor for name in node.input[2:4]]
            count += not any(tf.make_ndarray(seed) for seed in seeds)
    return count


def graph_of(dataset: Batches) -> Any:
    """Returns the graph of a dataset, which holds what is in memory: read it once."""
    from tensorflow.core.framework import graph_pb2

    variant = tf.data.experimental.to_variant(dataset)
    try:  # The policy has no effect: the graph is not run.
        serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=1)
    except tf.errors.OpError:
        return graph_pb2.GraphDef()  # A third-party dataset; the first batch of a pass will tell.
    return graph_pb2.GraphDef.FromString(serialized.numpy())


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
