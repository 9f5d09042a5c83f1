"""What the tests of data have in common: strategies, numbered rows, shards as lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from each import each

import tfmultigpu as tmg

HOST_AND_DEVICE = each("prefetch", [False, True])


def mirrored(replicas: int) -> tf.distribute.Strategy:
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def batches_of(sizes: tuple[int, ...]) -> tf.data.Dataset:
    """Batches of these many rows, numbered through from zero."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    pairs = tf.data.Dataset.from_tensor_slices((starts, starts + np.array(sizes)))
    return pairs.map(lambda start, stop: tf.range(start, stop))


def to_list(leaf: Any) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()


def local(strategy: tf.distribute.Strategy, leaf: Any) -> list[Any]:
    if leaf is None:
        return [None] * strategy.num_replicas_in_sync
    return [to_list(part) for part in strategy.experimental_local_results(leaf)]


def read(data: tmg.data.ShardedDataset) -> list[Any]:
    return [local(data.strategy, batch) for batch in data]


def text_of(make: Callable[[], Any], kind: type[Exception] = tmg.errors.DataError) -> str:
    with pytest.raises(kind) as caught:
        make()
    return str(caught.value)
