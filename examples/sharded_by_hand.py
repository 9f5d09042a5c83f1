"""Data divided by hand, what goes wrong there, and ``distribute_dataset``.

The usual answer calls ``dataset.shard(n, i)`` in a function for
``strategy.distribute_datasets_from_function``, then ``.batch(global_batch_size // replicas)``.

- ``shard`` after an unseeded shuffle: some examples are on two workers and others on none.
- On one machine ``context.num_input_pipelines`` is 1 however many GPUs there are: ``shard`` does
  nothing, and replicas draw their batches in turn.
- At the end of the data a replica draws a short batch, and the next one an empty one: layers crash
  on zero rows or make the weights NaN.

Let ``distribute_dataset`` cut *global* batches: every worker runs the same pipeline.
"""

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(197, 16)).astype("float32")  # 6 batches of 32 and one of 5
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def divided_by_hand(context):
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.batch(context.get_per_replica_batch_size(32))


def train(strategy, data):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    assert sum(int(step(batch)["weight"]) for batch in data) == 197
    return model.get_weights()


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus[:2] if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
several = tmg.create_strategy(devices=devices)
single = tmg.create_strategy(devices=devices[:1])
try:
    train(several, several.distribute_datasets_from_function(divided_by_hand))
except tmg.errors.DataError as error:
    print(f"by hand: {error}")
else:
    raise AssertionError("an empty shard must not pass")
weights = train(several, tmg.distribute_dataset((x, y), several, batch_size=32))
reference = train(single, tmg.distribute_dataset((x, y), single, batch_size=32))
difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
print(f"2 replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
