"""A loop by hand with everything at once: float16, a loss scale, clipping, accumulation.

The usual answer decides on each replica whether the gradient is finite and how long it is: replicas
then skip different steps. One rule is enough: ``loss_sum`` and ``add`` inside ``strategy.run``;
``apply`` outside, and once.
"""

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(333, 16)).astype("float32")  # windows of 128, 128 and 32 + 32 + 13 rows
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy, batch_size, batches):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(32, "relu", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(2)])
        variables = model.trainable_variables
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        window, scale = tmg.GradientAccumulator(variables), tmg.LossScale(2.0**10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica(batch):
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(loss, batch[1], model(batch[0], training=True))
            target = scale.scale_loss(pair)
        window.add(tape.gradient(target, variables), pair)

    @tf.function
    def update():
        window.apply(optimizer, scale=scale, clip_norm=0.5)

    add = tf.function(lambda batch: strategy.run(replica, args=(batch,)), reduce_retracing=True)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=batch_size):
        add(batch)
        if window.count == batches:
            update()
    if window.count:  # the short window at the end
        update()
    assert optimizer.iterations == 3
    return model.get_weights()


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
weights = train(tmg.create_strategy(devices=devices), 32, 4)
reference = train(tmg.create_strategy(devices=devices[:1]), 128, 1)  # whole, on one device
difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
