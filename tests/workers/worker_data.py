"""Reads sharded data as one of several workers and prints its shards."""

from __future__ import annotations

import json

import numpy as np
import tensorflow as tf
from one_strategy import strategy

import tfmultigpu as tmg
from tfmultigpu.data.partition import marked_offsets


def batches() -> tf.data.Dataset:
    sizes = np.array([5, 1, 2, 64, 3])
    stops = np.cumsum(sizes)
    pairs = tf.data.Dataset.from_tensor_slices((stops - sizes, stops))
    return pairs.map(lambda start, stop: tf.range(start, stop))


def read(iterator: tmg.data.ShardIterator) -> list[list[int]]:
    """What the replica of this worker gets of each batch, with the rows of the global batch."""
    found = []
    for batch in iterator:
        (shard,) = strategy.experimental_local_results(batch)
        found.append([int(marked_offsets(batch)[-1]), *shard.numpy().tolist()])
    return found


@tf.function
def totals(data: tmg.data.ShardedDataset) -> tuple[tf.Tensor, tf.Tensor]:
    total, rows = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    for batch in data:
        total += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
        rows += marked_offsets(batch)[-1]
    return total, rows


results = {}
for shares in (None, (3, 1)):
    data = tmg.distribute_dataset(batches(), strategy, shares=shares)
    results[f"{shares}"] = read(iter(data))
results["again"] = read(iter(data)) == read(iter(data))
results["totals"] = [int(value) for value in totals(data)]
shuffled = tf.data.Dataset.range(20).shuffle(20, seed=3).batch(8)
data = tmg.distribute_dataset(shuffled, strategy)
results["shuffled"] = [read(iter(data)), read(iter(data))]


was_read: list[int] = []


def draw(number: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    def read_example(number: np.ndarray) -> np.ndarray:
        was_read.append(int(number))
        return number

    example = tf.ensure_shape(tf.numpy_function(read_example, [number], tf.int64), [])
    return example, tf.random.stateless_uniform([], seed)


for seed in (7, None):
    was_read.clear()
    data = tmg.distribute_dataset(np.arange(11), strategy, batch_size=4, preprocess=draw, seed=seed)
    local = [[strategy.experimental_local_results(one)[0] for one in pair] for pair in data]
    results[f"draws {seed}"] = [
        list(zip(numbers.numpy().tolist(), draws.numpy().tolist(), strict=True))
        for numbers, draws in local
    ]
    results["read by number"] = sorted(was_read)
# The rank of this worker among the replicas, as TensorFlow numbers them.
rank = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group)
results["replica"] = int(strategy.experimental_local_results(rank)[0])
print("RESULT", json.dumps(results))
