"""A Wasserstein GAN with gradient penalty: three critic steps per batch, a gradient in the loss.

The usual answer is a loop over the critic inside ``train_step``. The points between real and made
rows are drawn on each replica from the same seed, the penalty is ``tf.reduce_mean`` over one
replica's rows, and the optimizer adds these means: N times the gradient, with a short last batch
that counts too much. Nothing says so.

Critic and generator have a step each here. The slope of the critic is a gradient of each row by
itself, so a tape inside ``forward`` gives one penalty per row, and the loss is a sum over rows.
``chain_steps`` repeats the critic with fresh noise.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH, EPOCHS, NOISE, PENALTY = 32, 3, 4, 10.0

rng = np.random.default_rng(0)
real = rng.normal(size=(150, 8)).astype("float32").cumsum(axis=1)  # 4 batches of 32, one of 22


def mean_of(values):
    """Returns the mean of one value per row, not yet divided."""
    return tmg.LossSum(tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32))


def train(strategy):
    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = [layers.Dense(16), layers.LeakyReLU(), layers.LayerNormalization()]
        generator = keras.Sequential([keras.Input((NOISE,)), *hidden, layers.Dense(8)])
        generator.seeds = keras.random.SeedGenerator(1)  # an attribute: checkpoints have it
        hidden = [layers.Dense(16), layers.LeakyReLU()]
        critic = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1)])
        c_optimizer = keras.optimizers.RMSprop(1e-3)
        g_optimizer = keras.optimizers.RMSprop(1e-3)

    def imagine(batch, training):
        noise = keras.random.normal((tf.shape(batch)[0], NOISE), seed=generator.seeds)
        return generator(noise, training=training)

    def critic_forward(critic, batch, training):
        fake = imagine(batch, training)
        where = keras.random.uniform((tf.shape(batch)[0], 1), seed=generator.seeds)
        between = batch + where * (fake - batch)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = critic(between, training=training)
        slopes = tf.norm(tape.gradient(scores, between), axis=1)
        distance = critic(batch, training=training) - critic(fake, training=training)
        values = PENALTY * (slopes - 1.0) ** 2 - distance[:, 0]
        return mean_of(values), {"distance": mean_of(distance)}  # a value for the logs

    def generator_forward(generator, batch, training):
        return mean_of(-critic(imagine(batch, training), training=training)[:, 0])

    steps = (
        tmg.make_train_step(critic, c_optimizer, None, strategy, forward=critic_forward),
        tmg.make_train_step(generator, g_optimizer, None, strategy, forward=generator_forward),
    )
    step = tmg.chain_steps(*steps, names=("critic", "generator"), times=(3, 1))
    history = tmg.fit(generator, real, step=step, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    assert c_optimizer.iterations == 3 * g_optimizer.iterations == 3 * 5 * EPOCHS
    return generator.get_weights() + critic.get_weights(), history.history


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=3)
    reference, expected = train(tmg.create_strategy(devices=devices[:1]))
    differences = []
    for count in sorted({2, len(devices)}):
        weights, logs = train(tmg.create_strategy(devices=devices[:count]))
        differences += [np.abs(a - b).max() for a, b in zip(weights, reference, strict=True)]
        assert all(np.allclose(logs[name], expected[name], atol=1e-3) for name in expected)
    print("  " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in logs.items()))
    counts = " and ".join(str(count) for count in sorted({2, len(devices)}))
    print(f"{counts} replicas, largest weight difference to one device: {max(differences):.1e}")
    assert max(differences) < 1e-3


if __name__ == "__main__":
    main()
