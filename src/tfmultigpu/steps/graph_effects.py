"""Operations of a graph that act when they run, whether or not anybody uses their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat

__all__ = ["effects_of", "noting_operations", "run_after"]


@contextmanager
def noting_operations() -> Iterator[list[Any]]:
    """Yields a list that holds, at the end, the operations made in the context."""
    made: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield made
    made += graph.get_operations()[before:]


def effects_of(operations: Sequence[Any]) -> list[Any]:
    """Returns the stateful ones, which TensorFlow runs in any case: they change something or fail.

    Reads of variables, which always succeed, are left out.
    """
    return [one for one in operations if one.op_def.is_stateful and one.type != "ReadVariableOp"]


def run_after(operations: Sequence[Any], before: Sequence[Any]) -> None:
    """Has operations wait for others that were made before them, also those of replicas.

    ``tf.control_dependencies`` around ``strategy.run`` does not reach the threads of the replicas.

    Args:
        operations: All operations of a part of a graph, which wait for each other by their inputs.
        before: The operations to wait for.
    """
    waiting = [one for one in operations if one.type not in ("Const", "Placeholder")]
    names = {one.name for one in waiting}
    for one in waiting:
        inputs = [*(tensor.op for tensor in one.inputs), *one.control_inputs]
        if names.isdisjoint(each.name for each in inputs):
            _compat.add_control_inputs(one, before)
