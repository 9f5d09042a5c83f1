"""A training step written by hand, where the prepared step does not fit.

The usual answer computes the mean loss of each shard, divides it by the number of replicas or by a
constant batch size, and lets the optimizer add the gradients. That is right for even batches only:
with 13 rows on two replicas one mean is over 7 rows and the other over 6, and with a constant the
last batch counts too little.

``loss_sum`` gives the sum of the losses of a shard and its weight. ``GradientAccumulator.add`` adds
gradients of sums, and weights, on each replica. After ``strategy.run``, once for all replicas,
``reduce`` adds both over the replicas and divides, and ``apply_reduced_gradients`` updates.
``global_mean`` is the loss of the global batch, for logs.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH = 64  # of all replicas together

rng = np.random.default_rng(0)
x = rng.normal(size=(525, 16)).astype("float32")  # 8 batches of 64 and one of 13
y = (x @ rng.normal(size=16) > 0).astype("int32")


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)  # in the scope, before anything is traced
        window = tmg.GradientAccumulator(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = model.trainable_variables

    def replica(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(loss, labels, model(features, training=True))
        window.add(tape.gradient(pair.sum, variables), pair.weight)
        return tmg.global_mean(pair)  # the same on every replica: the loss of the global batch

    @tf.function(reduce_retracing=True)
    def step(batch):
        means = strategy.run(replica, args=(batch,))
        gradients, _ = window.reduce()
        tmg.apply_reduced_gradients(optimizer, gradients, variables)
        return strategy.experimental_local_results(means)[0]

    losses = [
        float(step(batch)) for batch in tmg.distribute_dataset((x, y), strategy, batch_size=BATCH)
    ]
    return model.get_weights(), losses


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    weights, losses = train(tmg.create_strategy(devices=devices))
    reference, expected = train(tmg.create_strategy(devices=devices[:1]))
    difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
    print(f"loss of the last batch, 13 rows: {losses[-1]:.6f}, on one device {expected[-1]:.6f}")
    print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
    assert difference < 1e-3
    assert np.allclose(losses, expected, atol=1e-3)


if __name__ == "__main__":
    main()
