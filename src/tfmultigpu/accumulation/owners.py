"""Owners of variables: the replica of a process that alone updates a variable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import tensorflow as tf

from tfmultigpu.errors import TfMultiGpuError

_T = TypeVar("_T")


def assign_owners(
    sizes: Sequence[int], owners: int, fixed: Mapping[int, int] | None = None
) -> tuple[int, ...]:
    """Returns the owner of each variable by sizes: largest first, each to whoever owns least.

    No owner has more than the mean and the largest variable together. ``fixed`` has the owners of
    variables that have one already, by their index.
    """
    chosen = dict(fixed or {})
    loads = [sum(sizes[i] for i in chosen if chosen[i] == owner) for owner in range(owners)]
    for index in sorted(set(range(len(sizes))) - set(chosen), key=lambda i: (-sizes[i], i)):
        chosen[index] = loads.index(min(loads))
        loads[chosen[index]] += sizes[index]
    return tuple(chosen[index] for index in range(len(sizes)))


def outside_scopes(function: Callable[[], _T]) -> _T:
    """Calls a function without any strategy in effect, in the graph of the caller.

    TensorFlow has no way out of a scope but another thread.
    """
    if not tf.distribute.has_strategy():
        return function()
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def call() -> _T:
        with nullcontext() if graph is None else graph.as_default():
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers inside a ``MultiOptimizer``, or the optimizer itself."""
    return list(getattr(optimizer, "optimizers", ())) or [optimizer]


def refuse_float8(variables: Sequence[Any]) -> None:
    """Raises an error for trained float8 layers, whose scales replicas cannot add."""
    new = [
        getattr(v, "path", v.name) for v in variables if getattr(v, "overwrite_with_gradient", 0)
    ]
    if new:
        raise TfMultiGpuError(
            "A float8 layer computes its scales from the gradients of a whole batch, which cannot "
            f'be added or divided. Received: {new[:3]}. Leave out layer.quantize("float8"), or '
            "train on one device with model.fit of Keras."
        )


def size_of(variable: Any) -> int:
    """Returns the number of elements of a variable."""
    return int(tf.TensorShape(variable.shape).num_elements() or 0)
