"""A generative adversarial network: two models, two optimizers, each batch for both in turn.

The usual answer overrides ``train_step`` of a ``keras.Model`` that holds both. Means of the losses
on each replica count a short last batch wrongly, every replica draws the same noise, and what
BatchNormalization of the generator sees is one replica's part. Keras builds one optimizer of a
model; with two ``fit`` stops with "You must feed a value for placeholder tensor".

Each model has a step made for it here. ``chain_steps`` gives each batch to one after the other; the
generator meets the discriminator that has just been trained. ``fit`` takes the chain for its step.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH, EPOCHS, NOISE = 32, 3, 4

rng = np.random.default_rng(0)
real = rng.normal(size=(150, 8)).astype("float32").cumsum(axis=1)  # 4 batches of 32, one of 22
loss = keras.losses.BinaryCrossentropy(from_logits=True)


def make_models():
    layers = keras.layers
    normal = layers.BatchNormalization(synchronized=True)
    hidden = [layers.Dense(16, use_bias=False), normal, layers.LeakyReLU()]
    generator = keras.Sequential(
        [keras.Input((NOISE,)), *hidden, layers.Dense(8)], name="generator"
    )
    generator.seeds = keras.random.SeedGenerator(1)  # an attribute, so that checkpoints have it
    hidden = [layers.Dense(16), layers.LeakyReLU(), layers.Dropout(0.2)]
    discriminator = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1)], name="critic")
    return generator, discriminator


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        generator, discriminator = make_models()
        d_optimizer = keras.optimizers.Adam(1e-2, beta_1=0.5)
        g_optimizer = keras.optimizers.Adam(1e-2, beta_1=0.5)

    def imagine(batch, training):
        noise = keras.random.normal((tf.shape(batch)[0], NOISE), seed=generator.seeds)
        return generator(noise, training=training)

    def d_forward(discriminator, batch, training):
        logits = discriminator(batch, training=training)
        fake_logits = discriminator(imagine(batch, training), training=training)
        found = tmg.loss_sum(loss, tf.ones_like(logits), logits)
        refused = tmg.loss_sum(loss, tf.zeros_like(fake_logits), fake_logits)
        right = tf.reduce_sum(tf.cast(logits > 0, tf.float32))
        return tmg.LossSum(found.sum + refused.sum, found.weight), {"found": (right, found.weight)}

    def g_forward(generator, batch, training):
        logits = discriminator(imagine(batch, training), training=training)
        return tmg.loss_sum(loss, tf.ones_like(logits), logits)

    d_step = tmg.make_train_step(discriminator, d_optimizer, None, strategy, forward=d_forward)
    g_step = tmg.make_train_step(generator, g_optimizer, None, strategy, forward=g_forward)
    step = tmg.chain_steps(d_step, g_step, names=("d", "g"))
    history = tmg.fit(generator, real, step=step, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    assert d_optimizer.iterations == g_optimizer.iterations == 5 * EPOCHS
    return generator.get_weights() + discriminator.get_weights(), history.history


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=3)
    reference, expected = train(tmg.create_strategy(devices=devices[:1]))
    differences = []
    for count in sorted({2, len(devices)}):
        weights, logs = train(tmg.create_strategy(devices=devices[:count]))
        differences += [np.abs(a - b).max() for a, b in zip(weights, reference, strict=True)]
        assert all(np.allclose(logs[name], expected[name], rtol=1e-3) for name in expected)
    print("  " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in logs.items()))
    counts = " and ".join(str(count) for count in sorted({2, len(devices)}))
    print(f"{counts} replicas, largest weight difference to one device: {max(differences):.1e}")
    assert max(differences) < 1e-3


if __name__ == "__main__":
    main()
