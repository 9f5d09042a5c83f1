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


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
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


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_window_with_a_batch_smaller_than_the_replicas(replicas):
    loss = keras.losses.MeanSquaredError()
    # Batches of 10, 10 and 1 rows; windows of two, the last one short.
    windows = [slice(0, 20), slice(20, 21)] if replicas == 2 else [slice(0, 10), slice(10, 21)]
    expected = one_device(loss, windows)
    strategy = tmg.create_strategy(devices=[f"CPU:{i}" for i in range(replicas)])
    model, optimizer = model_and_optimizer(strategy)
    with strategy.scope():
        accumulator = tmg.GradientAccumulator(model.trainable_variables)

    def add(batch, weight):
        x, y = batch
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(loss, y, model(x, training=True), row_weight=weight)
        gradients = tape.gradient(pair.sum, [v.value for v in model.trainable_variables])
        accumulator.add(gradients, pair.weight)

    def update():
        gradients, weight = accumulator.reduce()
        tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)
        return weight

    batches = list(tmg.distribute_dataset((X, Y), strategy, batch_size=10))
    groups = [batches[:2], batches[2:]] if replicas == 2 else [batches[:1], batches[1:]]
    weights = []
    for group in groups:
        for batch in group:
            strategy.run(add, args=(batch, tmg.data.row_weight(batch, strategy)))
        assert accumulator.count == len(group)
        weight = strategy.run(update)
        weights.append(float(strategy.experimental_local_results(weight)[0]))
    assert weights == pytest.approx([20, 1] if replicas == 2 else [10, 11])
    assert largest_difference(model.get_weights(), expected) <= 1e-6


def test_a_batch_that_something_else_cut_has_no_row_weight():
    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(4)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    with pytest.raises(tmg.DataError, match="The number of rows of the global batch is unknown"):
        tmg.data.row_weight(batch, strategy)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2])
def test_loss_scale_clipping_and_accumulation_decide_once_for_all_replicas(replicas, window):
    """Overflows skip a step on all replicas; the prepared step on one device does the same."""
    weights = np.ones(21, "float32")
    weights[7] = 1e36  # Times a scale of 2**10 this overflows, on one replica only.
    model, optimizer = model_and_optimizer(tf.distribute.get_strategy())
    step = tmg.make_train_step(
        model, optimizer, "mse", clip_norm=0.3, loss_scale="dynamic", verify=False
    )
    step(tuple(one[:1] for one in (X, Y, np.zeros(1, "float32"))))  # Makes its loss scale.
    step.loss_scale.scale.assign(1024.0)
    groups = [np.arange(i, min(i + 5 * window, 21)) for i in range(0, 21, 5 * window)]
    norms = []
    for rows in groups:
        logs = step((X[rows], Y[rows], weights[rows]))
        norms.append(float(logs["gradient_norm"]))

    strategy = tmg.create_strategy(devices=[f"CPU:{i}" for i in range(replicas)])
    own, own_optimizer = model_and_optimizer(strategy)
    variables = own.trainable_variables
    with strategy.scope():
        accumulator = tmg.GradientAccumulator(variables)
        loss_scale = tmg.LossScale(1024.0)

    def add(batch, row_weight):
        x, y, w = batch
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum("mse", y, own(x, training=True), w, row_weight=row_weight)
            scaled = loss_scale.scale_loss(pair.sum)
        accumulator.add(tape.gradient(scaled, [v.value for v in variables]), pair.weight)

    def reduce():
        gradients, finite = loss_scale.unscale(accumulator.reduce()[0])
        gradients, norm = tmg.clip_gradients(gradients, 0.3)
        return gradients, norm, finite

    def apply(gradients):
        tmg.apply_reduced_gradients(own_optimizer, gradients, variables)

    @tf.function
    def update():
        gradients, norm, finite = strategy.run(reduce)
        local = strategy.experimental_local_results
        if local(finite)[0]:
            strategy.run(apply, args=(gradients,))
        loss_scale.update(local(finite)[0])
        return local(norm)[0], local(finite)[0]

    found, finite = [], []
    batches = list(tmg.distribute_dataset((X, Y, weights), strategy, batch_size=5))
    for start in range(0, len(batches), window):
        for batch in batches[start : start + window]:
            strategy.run(add, args=(batch, tmg.data.row_weight(batch, strategy)))
        norm, good = update()
        found.append(float(norm))
        finite.append(bool(good))
    assert finite.count(False) == 1
    assert int(own_optimizer.iterations.numpy()) == len(groups) - 1
    assert float(loss_scale.value()) == float(step.loss_scale.value()) == 512.0
    np.testing.assert_allclose(np.array(found)[finite], np.array(norms)[finite], rtol=1e-5)
    assert largest_difference(own.get_weights(), model.get_weights()) <= 1e-6


def test_what_loss_scale_and_clipping_refuse():
    with pytest.raises(ValueError, match=r"positive and finite\. Received: loss_scale=0"):
        tmg.LossScale(0)
    with pytest.raises(ValueError, match=r"limit must be positive\. Received: limit=0"):
        tmg.clip_gradients([tf.constant([1.0])], 0)
    fixed = tmg.LossScale(8.0, growth_steps=None)
    fixed.update(tf.constant(False))
    assert float(fixed.value()) == 8.0
    assert fixed.variables == []
