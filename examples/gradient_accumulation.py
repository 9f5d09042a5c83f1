"""Several batches, one update: a large batch on little memory, in a loop written by hand.

The usual answer adds the gradients of mean losses to variables and divides by how many there were.
That is a mean of means, wrong as soon as two batches differ in size, and what is left at the end of
the data is dropped or carried into the next epoch. The optimizer then adds the gradients over the
replicas, whether or not that was done before, and Keras' own ``gradient_accumulation_steps`` stops
on two replicas with "merge_call called while defining a new graph or a tf.function".

``GradientAccumulator`` adds gradients of loss *sums*, and weights, on each replica; ``reduce`` adds
them over the replicas, once, and divides. ``apply_reduced_gradients`` does not add again. (With
``make_train_step(..., micro_batches=4)`` all of this is one argument.)
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH, WINDOW = 32, 4  # four batches make one update: 128 rows

rng = np.random.default_rng(0)
x = rng.normal(size=(333, 16)).astype("float32")  # two windows of 128 rows and one of 32 + 32 + 13
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy, batch_size, window):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        accumulator = tmg.GradientAccumulator(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def add(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            total, weight = tmg.loss_sum(loss, labels, model(features, training=True))
        accumulator.add(tape.gradient(total, model.trainable_variables), weight)

    def update():
        gradients, _ = accumulator.reduce()  # of the mean over all rows of the window
        tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)

    add_batch = tf.function(lambda batch: strategy.run(add, args=(batch,)), reduce_retracing=True)
    update_weights = tf.function(update)  # once, outside of the replicas

    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=batch_size):
        add_batch(batch)
        if accumulator.count == window:
            update_weights()
    if accumulator.count:  # the short window at the end
        update_weights()
    return model.get_weights(), int(optimizer.iterations.numpy())


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    weights, updates = train(tmg.create_strategy(devices=devices), BATCH, WINDOW)
    single = tmg.create_strategy(devices=devices[:1])
    reference, expected = train(single, BATCH * WINDOW, 1)  # whole, without accumulation
    difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
    print(f"{updates} updates of {WINDOW} batches of {BATCH}, against whole ones on one device")
    print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
    assert updates == expected == 3
    assert difference < 1e-3


if __name__ == "__main__":
    main()
