"""Our step on N replicas, for tests that look at something in it.

What is trained on one device and on replicas, to be compared, is a case of ``tests/cases``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.pair import dataset_of

import tfmultigpu as tmg
from tfmultigpu.strategies.process_state import process_state

SEED = 7


@functools.cache
def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """One strategy for each number of replicas: two on one process must not share collectives."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    return unused_strategy(replicas)


def unused_strategy(replicas: int) -> tf.distribute.Strategy:
    """A new strategy, for what depends on the variables that are alive on it: their places."""
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    process_state.ignore(strategy)  # One device is meant where none is given.
    return strategy


def step_on(
    replicas: int | tf.distribute.Strategy,
    build: Callable[[], Any],
    optimizer: Callable[[], Any],
    loss: Any,
    **options: Any,
) -> Any:
    """Returns our step of a model and an optimizer that begin the same each time."""
    strategy = strategy_of(replicas) if isinstance(replicas, int) else replicas
    with strategy.scope():
        keras.utils.set_random_seed(SEED)
        model, made = build(), optimizer()
    return tmg.make_train_step(model, made, loss, strategy, **options)


def graph_of(step: Any, batch: Any) -> tf.Graph:
    """The graph of a step that is built: where and when it computes what."""
    graphs: list[tf.Graph] = []

    @tf.function
    def look() -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return step(batch)

    step(batch)
    look()
    return graphs[0]


def plain(logs: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items()}


def difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """The largest difference of any weight; NaN is never equal."""
    assert len(one) == len(other)
    largest = [
        np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0)
        for a, b in zip(one, other, strict=True)
    ]
    return float(np.max(largest))


def cut(arrays: Sequence[np.ndarray], sizes: Iterable[int]) -> list[tuple[np.ndarray, ...]]:
    """Batches of these sizes, read one after the other and again from the start."""
    rows, batches, start = len(arrays[0]), [], 0
    for size in sizes:
        if start + size > rows:
            start = 0
        batches.append(tuple(array[start : start + size] for array in arrays))
        start += size
    return batches


def as_dataset(batches: Sequence[tuple[np.ndarray, ...]]) -> tf.data.Dataset:
    """A dataset that yields exactly these global batches."""
    return dataset_of(lambda: batches, batches[0])
