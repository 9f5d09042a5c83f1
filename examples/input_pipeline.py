"""A fast input pipeline: read once, shuffle, batch, prefetch, and many steps in one call.

The usual answer has the right pieces in a harmful order: ``shuffle`` before ``cache`` gives the
same order in every epoch, ``batch`` before ``shuffle`` mixes batches instead of examples, ``cache``
after a random augmentation freezes it, ``drop_remainder=True`` loses examples, and ``batch(64)``
under four GPUs is 16 rows for each.

The pipeline yields global batches. ``step.run`` does ten steps per call into TensorFlow.
"""

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(1003, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def prepare(number, features, target):
    return number, tf.clip_by_value(features, -3.0, 3.0), target


def pipeline():
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(1003), x, y))
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)  # the costly part
    dataset = dataset.cache()  # once; what is random comes after this line
    dataset = dataset.shuffle(1003, seed=0)  # examples, anew in each epoch; workers need the seed
    return dataset.batch(64).prefetch(tf.data.AUTOTUNE)  # the batch of all replicas together


def squared_error(model, batch, training):
    return tmg.loss_sum("mse", batch[2], model(batch[1], training=training))


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, None, strategy, forward=squared_error)
    data = tmg.distribute_dataset(pipeline(), strategy)
    for epoch in range(3):
        iterator, rows = iter(data), 0.0
        while (logs := step.run(iterator, 10))["steps"]:  # none left: the epoch has ended
            rows += float(logs["weight"])
        print(f"  epoch {epoch + 1}: {rows:.0f} examples")
    return model.get_weights()


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=4)
weights = train(tmg.create_strategy(devices=devices))
reference = train(tmg.create_strategy(devices=devices[:1]))
difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
