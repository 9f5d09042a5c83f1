"""Steps in turn on each batch, held to a loop for one device that contains no code of ours."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import SEED, strategy_of

import tfmultigpu as tmg

SIZES = (5, 1, 3, 2, 7, 4)
ROWS = np.random.default_rng(2).normal(size=(sum(SIZES), 4)).astype("float32")
BATCHES = [
    ROWS[sum(SIZES[:i]) : sum(SIZES[:i]) + size]  # Fewer rows than replicas among them.
    for i, size in enumerate(SIZES)
]
BCE = keras.losses.BinaryCrossentropy(from_logits=True)


class Gan:
    """A generator with BatchNormalization, a discriminator with dropout, two optimizers."""

    def __init__(self, strategy: Any) -> None:
        keras.utils.set_random_seed(SEED)
        with strategy.scope():
            self.generator = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Dense(5),
                    keras.layers.BatchNormalization(synchronized=strategy.num_replicas_in_sync > 1),
                    keras.layers.Dense(4),
                ],
                name="generator",
            )
            self.discriminator = keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.Dense(6, "tanh"),
                    keras.layers.Dropout(0.3, seed=5),
                    keras.layers.Dense(1),
                ],
                name="discriminator",
            )
            self.generator.seeds = keras.random.SeedGenerator(9)
            self.optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]

    def noise(self, batch: Any) -> Any:
        return keras.random.normal((tf.shape(batch)[0], 3), seed=self.generator.seeds)

    @property
    def weights(self) -> list[np.ndarray]:
        return [v.numpy() for v in [*self.generator.variables, *self.discriminator.variables]]


def train_by_hand(gan: Gan, batches: list[Any], times: tuple[int, int]) -> list[tuple[float, ...]]:
    """Returns the losses of each batch: the mean over the times, and the share that was right."""

    def update(model: Any, optimizer: Any, compute: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss, right = compute()
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return loss, right

    losses = []
    for batch in batches:
        batch = tf.constant(batch)

        def judge(batch: Any = batch) -> tuple[Any, Any]:
            fake = gan.generator(gan.noise(batch), training=True)
            real = gan.discriminator(batch, training=True)
            fake = gan.discriminator(fake, training=True)
            loss = BCE(tf.ones_like(real), real) + BCE(tf.zeros_like(fake), fake)
            return loss, tf.reduce_mean(tf.cast(real > 0, tf.float32))

        def forge(batch: Any = batch) -> tuple[Any, Any]:
            fake = gan.generator(gan.noise(batch), training=True)
            fake = gan.discriminator(fake, training=True)
            return BCE(tf.ones_like(fake), fake), 0.0

        first, second = gan.optimizers
        d = [update(gan.discriminator, first, judge) for _ in range(times[0])]
        g = [update(gan.generator, second, forge) for _ in range(times[1])]
        means = [np.mean([float(one[i]) for one in d]) for i in (0, 1)]
        losses.append((*means, np.mean([float(one[0]) for one in g])))
    return losses


def steps_of(gan: Gan, strategy: Any, **options: Any) -> tuple[Any, Any]:
    def judge(model: Any, batch: Any, training: bool) -> Any:
        fake = gan.generator(gan.noise(batch), training=training)
        real, fake = model(batch, training=training), model(fake, training=training)
        one = tmg.loss_sum(BCE, tf.ones_like(real), real)
        other = tmg.loss_sum(BCE, tf.zeros_like(fake), fake)
        right = tf.reduce_sum(tf.cast(real > 0, tf.float32))
        return tmg.LossSum(one.sum + other.sum, one.weight), {"right": (right, one.weight)}

    def forge(model: Any, batch: Any, training: bool) -> Any:
        fake = gan.discriminator(model(gan.noise(batch), training=training), training=training)
        return tmg.loss_sum(BCE, tf.ones_like(fake), fake)

    first, second = gan.optimizers
    return (
        tmg.make_train_step(gan.discriminator, first, None, strategy, forward=judge, **options),
        tmg.make_train_step(gan.generator, second, None, strategy, forward=forge, **options),
    )


@functools.cache
def truth(times: tuple[int, int]) -> tuple[list[tuple[float, ...]], list[np.ndarray]]:
    gan = Gan(strategy_of(1))
    losses = train_by_hand(gan, BATCHES, times)
    return losses, gan.weights


def assert_same(weights: list[np.ndarray], times: tuple[int, int]) -> None:
    # Normalization over one or two rows multiplies what rounding leaves.
    for own, other in zip(weights, truth(times)[1], strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("replicas", "times"), [(2, (1, 1)), (1, (3, 2)), (3, (3, 2))])
def test_each_batch_trains_the_steps_in_turn(replicas: int, times: tuple[int, int]) -> None:
    strategy = strategy_of(replicas)
    gan = Gan(strategy)
    step = tmg.chain_steps(*steps_of(gan, strategy), names=("d", "g"), times=times)
    for number, (batch, expected) in enumerate(zip(BATCHES, truth(times)[0], strict=True)):
        logs = step(batch)
        found = [float(logs[name]) for name in ("d_loss", "d_right", "g_loss")]
        np.testing.assert_allclose(found, expected, rtol=2e-4, err_msg=f"batch {number}")
        assert float(logs["d_weight"]) == len(batch) * times[0]
        assert float(logs["g_weight"]) == len(batch) * times[1]
    assert_same(gan.weights, times)
    counts = [int(optimizer.iterations.numpy()) for optimizer in gan.optimizers]
    assert counts == [len(BATCHES) * time for time in times]
    if replicas > 1:
        outcomes = {name: found.outcome for name, found in step.verification.items() if found}
        assert outcomes == {"d": "same", "g": "same"}


@pytest.mark.parametrize("verify", ["first", True])
def test_many_batches_in_one_call(verify: bool | str) -> None:
    times = (3, 2)
    strategy = strategy_of(2)
    gan = Gan(strategy)
    step = tmg.chain_steps(*steps_of(gan, strategy, verify=verify), names=("d", "g"), times=times)
    data = tf.data.Dataset.from_generator(
        lambda: iter(BATCHES), output_signature=tf.TensorSpec([None, 4])
    )
    iterator = iter(tmg.distribute_dataset(data, strategy))
    first, second, none = step.run(iterator, 4), step.totals(iterator, 9), step.run(iterator, 3)
    assert_same(gan.weights, times)
    assert [int(one["steps"]) for one in (first, second, none)] == [4, 2, 0]
    losses, sizes = np.array(truth(times)[0]), np.array(SIZES)
    for i, name in enumerate(("d_loss", "d_right", "g_loss")):
        mean = np.sum((losses[:, i] * sizes)[:4]) / sizes[:4].sum()
        np.testing.assert_allclose(float(first[name]), mean, rtol=2e-4)
    assert float(first["d_weight"]) == 3 * sizes[:4].sum()
    assert float(second["rows"]) == sizes[4:].sum()
    total = float(np.sum((losses[:, 2] * sizes)[4:]))
    np.testing.assert_allclose(float(second["g_loss"]), total, rtol=2e-4)
    # A value with its own weight is a sum over all times, not their mean.
    right = float(second["d_right"]) / float(second["d_right_weight"])
    np.testing.assert_allclose(
        right, np.sum((losses[:, 1] * sizes)[4:]) / sizes[4:].sum(), rtol=2e-4
    )
    assert set(first) - {"steps"} == {
        "d_loss",
        "d_weight",
        "d_right",
        "d_right_sum",
        "d_right_weight",
        "d_gradient_norm",
        "d_skipped",
        "d_loss_scale",
        "g_loss",
        "g_weight",
        "g_gradient_norm",
        "g_skipped",
        "g_loss_scale",
    }


def test_a_layer_frozen_between_calls_stays() -> None:
    gan = Gan(strategy_of(2))
    step = tmg.chain_steps(*steps_of(gan, strategy_of(2)))
    step(BATCHES[0])
    gan.generator.layers[-1].trainable = False
    kept, moved = gan.generator.layers[-1].kernel.numpy(), gan.generator.layers[0].kernel.numpy()
    step(BATCHES[1])
    np.testing.assert_array_equal(gan.generator.layers[-1].kernel.numpy(), kept)
    assert np.abs(gan.generator.layers[0].kernel.numpy() - moved).max() > 0


def test_a_step_that_overflows_is_skipped_and_the_other_is_not() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in range(2)]
        optimizers = [keras.optimizers.SGD(0.1) for _ in range(2)]
    steps = [
        tmg.make_train_step(model, optimizer, "mse", strategy, loss_scale=scale, verify=False)
        for model, optimizer, scale in zip(models, optimizers, (2.0**127, None), strict=True)
    ]
    before = [model.get_weights() for model in models]
    batch = (100 * BATCHES[0], np.ones((len(BATCHES[0]), 1), "float32"))
    logs = tmg.chain_steps(*steps, names=("a", "b"), times=(2, 1))(batch)
    assert (float(logs["a_skipped"]), float(logs["b_skipped"])) == (2.0, 0.0)
    np.testing.assert_array_equal(models[0].get_weights()[0], before[0][0])
    assert np.abs(models[1].get_weights()[0] - before[1][0]).max() > 0
    assert [int(optimizer.iterations.numpy()) for optimizer in optimizers] == [0, 1]


def test_names_are_those_of_the_models_or_numbers() -> None:
    strategy = strategy_of(1)
    gan = Gan(strategy)
    first, second = steps_of(gan, strategy)
    assert list(tmg.chain_steps(first, second).steps) == ["discriminator", "generator"]
    assert list(tmg.chain_steps(first, first).steps) == ["step1", "step2"]


def test_what_is_no_chain_is_refused_with_the_line_to_write() -> None:
    gan, other = Gan(strategy_of(1)), Gan(strategy_of(2))
    first, second = steps_of(gan, strategy_of(1))
    with pytest.raises(TypeError, match=r"Received: list\. Write tmg\.chain_steps\(d_step, g_s"):
        tmg.chain_steps([first, second])
    with pytest.raises(ValueError, match="at least one step"):
        tmg.chain_steps()
    with pytest.raises(ValueError, match="must run on one strategy"):
        tmg.chain_steps(first, steps_of(other, strategy_of(2))[1])
    with pytest.raises(ValueError, match="times must be a whole number, at least 1"):
        tmg.chain_steps(first, second, times=(5, 0))


def test_a_chain_is_profiled_and_explained() -> None:
    strategy = strategy_of(2)
    gan = Gan(strategy)
    step = tmg.chain_steps(*steps_of(gan, strategy), names=("d", "g"), times=(2, 1))
    data = tmg.distribute_dataset(tf.data.Dataset.from_tensor_slices(ROWS).batch(8), strategy)
    before = [int(optimizer.iterations.numpy()) for optimizer in gan.optimizers]
    profile = tmg.tuning.profile_step(step, data, steps=2)
    after = [int(optimizer.iterations.numpy()) for optimizer in gan.optimizers]
    trained = [b - a for a, b in zip(before, after, strict=True)]
    assert trained[0] == 2 * trained[1] > 0
    assert len(profile.replicas) == 2
    assert min(profile.compute, profile.update, *profile.replicas) > 0
    report = tmg.explain(step, dataset=data, seconds=0)
    assert "model of generator" in report.facts
    assert set(report.facts["verification"].values()) <= {str(step.verification["d"])} | {
        str(one) for one in step.verification.values()
    }
    assert [finding.severity for finding in report.findings] == ["note"] * len(report.findings)
    outside = Gan(strategy_of(1))
    report = tmg.explain(tmg.chain_steps(*steps_of(outside, strategy_of(1))))
    assert report.findings
