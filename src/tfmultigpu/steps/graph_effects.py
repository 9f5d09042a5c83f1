"""Operations of a graph that act when they run, whether or not anybody uses their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

__all__ = ["noting_effects"]


@contextmanager
def noting_effects() -> Iterator[list[Any]]:
    """Yields a list that holds, at the end, the stateful operations made in the context.

    TensorFlow runs them in any case: they change something, or may fail. Reads of variables, which
    always succeed, are left out.
    """
    effects: list[Any] = []
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield effects
    made = graph.get_operations()[before:]
    effects += [one for one in made if one.op_def.is_stateful and one.type != "ReadVariableOp"]
