"""Data divided by hand, what goes wrong there, and ``distribute_dataset``.

The usual answer calls ``dataset.shard(n, i)`` in a function for
``strategy.distribute_datasets_from_function``, then ``.batch(global_batch_size // replicas)``.

- ``shard`` after an unseeded shuffle: every worker shuffles differently, so some examples are on
  two workers and others on none.
- On one machine ``context.num_input_pipelines`` is 1 however many GPUs there are: ``shard`` does
  nothing, and replicas draw their batches in turn.
- At the end of the data a replica draws a short batch, and the next one an empty one. Convolution,
  pooling and batch normalization crash on zero rows or make the weights NaN.

Divide by hand before shuffling, and see that the examples divide. Or let ``distribute_dataset`` cut
*global* batches: every worker runs the same pipeline, ``shuffle`` with a seed, and takes its rows.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH, EVEN = 32, 192  # the batch of all replicas together; 192 rows are 6 such batches

rng = np.random.default_rng(0)
x = rng.normal(size=(EVEN + 5, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def divided_by_hand(strategy, rows):
    def input_of_one_worker(context):
        dataset = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows]))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(context.get_per_replica_batch_size(BATCH))

    return strategy.distribute_datasets_from_function(input_of_one_worker)


def train(strategy, data):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    rows = sum(int(step(batch)["weight"]) for batch in data)
    return model.get_weights(), rows


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus[:2] if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    several = tmg.create_strategy(devices=devices)
    single = tmg.create_strategy(devices=devices[:1])

    shards = [tf.data.Dataset.range(1000).shuffle(1000).shard(2, i) for i in range(2)]
    seen = {int(example) for shard in shards for example in shard}
    print(f"shuffled without a seed, then sharded: {len(seen)} of 1000 examples are used")

    def difference(ours, data):
        reference, rows = train(single, data)
        assert rows == ours[1]
        return max(np.abs(a - b).max() for a, b in zip(ours[0], reference, strict=True))

    even = tmg.distribute_dataset((x[:EVEN], y[:EVEN]), single, batch_size=BATCH)
    by_hand = difference(train(several, divided_by_hand(several, EVEN)), even)
    print(f"by hand, {EVEN} rows that divide: difference to one device {by_hand:.1e}")
    try:
        train(several, divided_by_hand(several, EVEN + 5))
    except tmg.errors.DataError as error:
        print(f"by hand, {EVEN + 5} rows: {error}")
    else:
        raise AssertionError("an empty shard must not pass")

    cut = train(several, tmg.distribute_dataset((x, y), several, batch_size=BATCH))
    ours = difference(cut, tmg.distribute_dataset((x, y), single, batch_size=BATCH))
    print(f"distribute_dataset, {cut[1]} rows, largest weight difference to one device: {ours:.1e}")
    assert max(by_hand, ours) < 1e-3


if __name__ == "__main__":
    main()
