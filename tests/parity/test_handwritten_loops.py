"""Loops written by hand from the building blocks give one device's weights, small batches too."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmultigpu as tmg

RNG = np.random.default_rng(7)
X = RNG.normal(size=(21, 4)).astype("float32")
Y = RNG.normal(size=(21, 2)).astype("float32")


def model_and_optimizer(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
        )
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def one_device(loss, windows):
    model, optimizer = model_and_optimizer(tf.distribute.get_strategy())
    for rows in windows:
        with tf.GradientTape() as tape:
            value = loss(Y[rows], model(X[rows], training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    return model.get_weights()


def largest_difference(first, second):
    return max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("replicas", "reduction"), [(3, "sum"), (8, "sum_over_batch_size")])
def test_global_mean_of_batches_that_end_in_one_row(replicas, reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    expected = one_device(loss, [slice(i, i + 5) for i in range(0, 21, 5)])
    strategy = tmg.create_strategy(devices=[f"CPU:{i}" for i in range(replicas)])
    model, optimizer = model_and_optimizer(strategy)

    def replica(batch, weight):
        x, y = batch
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(loss, y, model(x, training=True), row_weight=weight)
            value = tmg.global_mean(pair)
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def step(iterator):
        batch = next(iterator)
        strategy.run(replica, args=(batch, tmg.data.row_weight(batch, strategy)))

    data = tmg.distribute_dataset((X, Y), strategy, batch_size=5)
    iterator = iter(data)
    for _ in range(len(data)):
        step(iterator)
    assert largest_difference(model.get_weights(), expected) <= 1e-6


def test_a_batch_that_something_else_cut_has_no_row_weight():
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(4)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    with pytest.raises(
        tmg.errors.DataError, match="The number of rows of the global batch is unknown"
    ):
        tmg.data.row_weight(batch, strategy)


def test_what_loss_scale_and_clipping_refuse():
    with pytest.raises(ValueError, match=r"positive and finite\. Received: loss_scale=0"):
        tmg.LossScale(0)
    with pytest.raises(ValueError, match=r"limit must be positive\. Received: limit=0"):
        tmg.clip_gradients([tf.constant([1.0])], 0)
    fixed = tmg.LossScale(8.0, growth_steps=None)
    fixed.update(tf.constant(False))
    assert float(fixed.value()) == 8.0
    assert fixed.variables == []
