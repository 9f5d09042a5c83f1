"""Several steps in turn on each batch, such as those of a GAN, are those of one device."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.model import FLOAT, regression, small
from law.pair import LOGS, SEED, dataset_of, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

SIZES = (5, 1, 3, 2, 7, 1)
ROWS = np.random.default_rng(2).normal(size=(sum(SIZES), 4))
EPOCHS = 2
BCE = keras.losses.BinaryCrossentropy(from_logits=True, **FLOAT)


def batches() -> list[np.ndarray]:
    return np.split(ROWS, np.cumsum(SIZES)[:-1])


def dataset() -> tf.data.Dataset:
    return dataset_of(batches, ROWS)


class Gan:
    """A generator that draws noise, a critic with dropout and L2, an optimizer for each."""

    def __init__(self, strategy: Any = None) -> None:
        keras.utils.set_random_seed(SEED)
        layers = keras.layers
        with strategy.scope() if strategy else contextlib.nullcontext():
            self.generator = keras.Sequential(
                [
                    keras.Input((3,), dtype="float64"),
                    layers.Dense(5, "tanh", **FLOAT),
                    layers.Dense(4, **FLOAT),
                ],
                name="generator",
            )
            self.critic = keras.Sequential(
                [
                    keras.Input((4,), dtype="float64"),
                    layers.Dense(6, "tanh", kernel_regularizer="l2", **FLOAT),
                    layers.Dropout(0.3, seed=5, **FLOAT),
                    layers.Dense(1, **FLOAT),
                ],
                name="critic",
            )
            self.seeds = keras.random.SeedGenerator(9)
            self.generator.seeds = self.seeds
            # The generator learns faster, so that a swap of the optimizers shows.
            self.optimizers = [keras.optimizers.SGD(rate, momentum=0.9) for rate in (0.1, 0.3)]
            self.generator.compile(optimizer=self.optimizers[1])

    def fake(self, batch: Any) -> Any:
        shape = (tf.shape(batch)[0], 3)
        return self.generator(
            keras.random.normal(shape, dtype="float64", seed=self.seeds), training=True
        )

    def values(self) -> list[np.ndarray]:
        owners = (self.critic, self.generator, *self.optimizers)
        return [variable.numpy() for owner in owners for variable in owner.variables]


@functools.cache
def truth() -> tuple[list[list[tuple[float, float]]], list[list[np.ndarray]]]:
    """Trains one device in plain Keras; returns losses by batch, and values after each epoch."""
    gan = Gan()
    for optimizer, model in zip(gan.optimizers, (gan.critic, gan.generator), strict=True):
        optimizer.build(model.trainable_variables)

    def train(model: Any, optimizer: Any, loss_of: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of()
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float64)])
    def both(batch: Any) -> Any:
        def judge() -> Any:
            fake = gan.critic(gan.fake(batch), training=True)
            real = gan.critic(batch, training=True)
            extra = gan.critic.losses[0]
            return BCE(tf.ones_like(real), real) + BCE(tf.zeros_like(fake), fake) + extra

        def forge() -> Any:
            fake = gan.critic(gan.fake(batch), training=True)
            return BCE(tf.ones_like(fake), fake)

        first = train(gan.critic, gan.optimizers[0], judge)
        return first, train(gan.generator, gan.optimizers[1], forge)

    losses, values = [], []
    for _ in range(EPOCHS):
        losses.append([tuple(float(loss) for loss in both(batch)) for batch in batches()])
        values.append(gan.values())
    return losses, values


def chained(gan: Gan, strategy: Any, **options: Any) -> Any:
    def judge(model: Any, batch: Any, training: bool) -> Any:
        fake = model(gan.fake(batch), training=training)
        real = model(batch, training=training)
        one = tmg.loss_sum(BCE, tf.ones_like(real), real)
        other = tmg.loss_sum(BCE, tf.zeros_like(fake), fake)
        return tmg.LossSum(one.sum + other.sum, one.weight)

    def forge(model: Any, batch: Any, training: bool) -> Any:
        fake = gan.critic(gan.fake(batch), training=training)
        return tmg.loss_sum(BCE, tf.ones_like(fake), fake)

    pairs = zip((gan.critic, gan.generator), gan.optimizers, (judge, forge), strict=True)
    steps = [
        tmg.make_train_step(model, optimizer, None, strategy, forward=forward, **options)
        for model, optimizer, forward in pairs
    ]
    return tmg.chain_steps(*steps)


def assert_same(gan: Gan, epoch: int) -> None:
    for ours, expected in zip(gan.values(), truth()[1][epoch], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-9)


# Fails if the second step runs first or sees the weights from before the first one, a draw is
# shared by both, an optimizer is the other's, or L2 of the critic counts in the generator's loss.
def test_each_batch_trains_the_steps_in_turn() -> None:
    strategy = strategy_of(3)
    gan = Gan(strategy)
    step = chained(gan, strategy)
    data = tmg.distribute_dataset(dataset(), strategy)
    losses = truth()[0]
    for shards, (first, second), size in zip(data, losses[0], SIZES, strict=True):
        logs = step(shards)
        np.testing.assert_allclose(logs["critic_loss"], first, **LOGS)
        np.testing.assert_allclose(logs["generator_loss"], second, **LOGS)
        assert float(logs["critic_weight"]) == float(logs["generator_weight"]) == size
    assert_same(gan, 0)


# Fails if in one call of several batches a step runs over all of them before the next one, or a
# loss is the mean of the losses of the batches.
def test_several_batches_in_one_call() -> None:
    strategy = strategy_of(2)
    gan = Gan(strategy)
    step = chained(gan, strategy, verify=False)
    data = tmg.distribute_dataset(dataset(), strategy)
    for epoch, losses in enumerate(truth()[0]):
        logs = step.run(iter(data), 100)
        assert int(logs["steps"]) == len(SIZES)
        means = np.average(losses, axis=0, weights=SIZES)
        np.testing.assert_allclose([logs["critic_loss"], logs["generator_loss"]], means, **LOGS)
        assert_same(gan, epoch)
    counts = [int(optimizer.iterations.numpy()) for optimizer in gan.optimizers]
    assert counts == [EPOCHS * len(SIZES)] * 2


# Fails if fit runs one of the steps only, or an epoch of the History is a mean over batches.
def test_fit_runs_the_chain_on_each_batch() -> None:
    strategy = strategy_of(3)
    gan = Gan(strategy)
    seen: list[Any] = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append((epoch, logs["critic_loss"]))
    )
    history = tmg.fit(
        gan.generator,
        dataset(),
        step=chained(gan, strategy, verify=False),
        epochs=EPOCHS,
        callbacks=[callback],
        verbose=0,
    ).history
    expected = np.average(truth()[0], axis=1, weights=SIZES)
    np.testing.assert_allclose(history["critic_loss"], expected[:, 0], **LOGS)
    np.testing.assert_allclose(history["generator_loss"], expected[:, 1], **LOGS)
    assert seen == list(enumerate(history["critic_loss"]))
    assert_same(gan, EPOCHS - 1)


# Fails if a step that is there several times does not take each batch as often, in its turn.
def test_a_step_takes_each_batch_several_times() -> None:
    strategy, sizes = strategy_of(3), (7, 2, 5, 1)
    keras.utils.set_random_seed(SEED)
    truth_of_one = small(clip_norm=0.2)
    loop = PlainLoop(truth_of_one, regression(sizes)[0])
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        one = small(clip_norm=0.2)
    often = tmg.make_train_step(one.model, one.optimizer, one.loss, strategy, clip_norm=0.2)
    step = tmg.chain_steps(often, often, often, names=("first", "second", "third"))
    data = dataset_of(lambda: regression(sizes), regression(sizes)[0])
    shards = tmg.distribute_dataset(data, strategy)
    for batch, shard in zip(regression(sizes), shards, strict=True):
        logs, expected = step(shard), [loop.step(batch)["loss"] for _ in range(3)]
        found = [float(logs[f"{name}_loss"]) for name in step.steps]
        np.testing.assert_allclose(found, expected, **LOGS)
    assert_values(one.values(), truth_of_one.values(), truth_of_one.variables())
