"""A loop written by hand with everything at once: float16, clipping and accumulation.

Each of these decides something about the gradient of the whole window, over all replicas: is it
finite, how long is it, may the weights be updated. The usual answer decides on each replica by
itself, before the gradients are added. Replicas then skip different steps, and clip twice.

One rule is enough: ``loss_sum`` and ``add`` are inside ``strategy.run``; from ``reduce`` on
everything is outside, and once. So there is one verdict, and one norm, for all replicas.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH, WINDOW = 32, 4  # four batches make one update: 128 rows

rng = np.random.default_rng(0)
x = rng.normal(size=(333, 16)).astype("float32")  # the last window has 32 + 32 + 13 rows
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy, batch_size, batches):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(32, "relu", dtype="mixed_float16")
        model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(2)])
        variables = model.trainable_variables
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(variables)
        window = tmg.GradientAccumulator(variables)
        scale = tmg.LossScale(2.0**10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica(batch):
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(loss, batch[1], model(batch[0], training=True))
            target = scale.scale_loss(pair.sum)
        window.add(tape.gradient(target, variables), pair.weight)

    @tf.function
    def update():
        gradients, finite = scale.unscale(window.reduce()[0])
        gradients, _ = tmg.clip_gradients(gradients, 0.5)
        tmg.apply_reduced_gradients(optimizer, gradients, variables, where=finite)
        scale.update(finite)

    add_batch = tf.function(
        lambda batch: strategy.run(replica, args=(batch,)), reduce_retracing=True
    )
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=batch_size):
        add_batch(batch)
        if window.count == batches:
            update()
    if window.count:
        update()
    return model.get_weights(), int(optimizer.iterations.numpy())


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    weights, updates = train(tmg.create_strategy(devices=devices), BATCH, WINDOW)
    single = tmg.create_strategy(devices=devices[:1])
    reference, expected = train(single, BATCH * WINDOW, 1)
    difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
    print(f"{updates} updates, each clipped to 0.5, on scaled gradients")
    print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
    assert updates == expected == 3
    assert difference < 1e-3


if __name__ == "__main__":
    main()
