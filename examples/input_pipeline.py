"""A fast input pipeline: read once, shuffle, batch, prefetch, and many steps in one call.

The usual answer has the right pieces in a harmful order, or batches for one device: ``shuffle``
before ``cache`` gives the same order in every epoch, ``batch`` before ``shuffle`` mixes batches
instead of examples, ``cache`` after a random augmentation freezes it, ``drop_remainder=True`` is
there only because the last batch is computed wrongly otherwise, and ``batch(64)`` under four GPUs
gives each of them 16 rows.

The pipeline below yields global batches; ``distribute_dataset`` cuts them, and ``step.run`` does
ten steps per call into TensorFlow. In the printed check each example is seen once in every epoch,
in another order each time.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

ROWS, BATCH, EPOCHS = 1003, 64, 3  # the batch of all replicas together: 16 a replica on four

rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def pipeline():
    dataset = tf.data.Dataset.from_tensor_slices({"id": np.arange(ROWS), "x": x, "y": y})
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)  # the costly part
    dataset = dataset.cache()  # once; what is random comes after this line
    dataset = dataset.shuffle(ROWS, seed=0)  # examples, anew in each epoch; workers need the seed
    return dataset.batch(BATCH).prefetch(tf.data.AUTOTUNE)


def prepare(example):
    return example | {"x": tf.clip_by_value(example["x"], -3.0, 3.0)}


def squared_error(model, batch, training):
    return tmg.loss_sum("mse", batch["y"], model(batch["x"], training=training))


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=squared_error)
    data = tmg.distribute_dataset(pipeline(), strategy)
    for epoch in range(EPOCHS):
        iterator, rows = iter(data), 0.0
        while (logs := step.run(iterator, 10))["steps"]:  # none left: the epoch has ended
            rows += float(logs["weight"])
        print(f"  epoch {epoch + 1}: {rows:.0f} examples")
    return model.get_weights()


def orders(strategy):
    """The ids in the order in which replicas get them, one list per epoch."""
    data = tmg.distribute_dataset(pipeline(), strategy)
    local = strategy.experimental_local_results
    return [[int(i) for b in data for part in local(b["id"]) for i in part] for _ in range(2)]


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=4)
    several = tmg.create_strategy(devices=devices)
    first, second = orders(several)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    print(f"each of {ROWS} examples once per epoch, in another order each time")
    print(f"on {', '.join(devices)}:")
    weights = train(several)
    print(f"on {devices[0]}:")
    reference = train(tmg.create_strategy(devices=devices[:1]))
    difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
    print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
    assert difference < 1e-3


if __name__ == "__main__":
    main()
