"""A generative adversarial network: two models, two optimizers, each batch for both in turn.

The usual answer overrides ``train_step`` of a ``keras.Model`` that holds both. Means of the losses
on each replica count a short last batch wrongly, and every replica draws the same noise.

Each model has a step here. ``chain_steps`` gives each batch to one after the other.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfmultigpu as tmg

rng = np.random.default_rng(0)
real = rng.normal(size=(150, 8)).astype("float32").cumsum(axis=1)  # 4 batches of 32, one of 22
loss = keras.losses.BinaryCrossentropy(from_logits=True)


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        normal = layers.BatchNormalization(synchronized=True)
        hidden = [layers.Dense(16, use_bias=False), normal, layers.LeakyReLU()]
        generator = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(8)])
        generator.seeds = keras.random.SeedGenerator(1)  # an attribute: checkpoints have it
        hidden = [layers.Dense(16), layers.LeakyReLU(), layers.Dropout(0.2)]
        critic = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1)])
        optimizers = [keras.optimizers.Adam(1e-2, beta_1=0.5) for _ in range(2)]

    def imagine(batch, training):
        noise = keras.random.normal((tf.shape(batch)[0], 4), seed=generator.seeds)
        return generator(noise, training=training)

    def critic_loss(critic, batch, training):
        found, made = critic(batch, training=training), imagine(batch, training)
        refused = critic(made, training=training)  # not one call for both: rows keep their draws
        right = tmg.loss_sum(loss, tf.ones_like(found), found)
        wrong = tmg.loss_sum(loss, tf.zeros_like(refused), refused)
        return tmg.LossSum(right.sum + wrong.sum, right.weight)

    def generator_loss(generator, batch, training):
        logits = critic(imagine(batch, training), training=training)
        return tmg.loss_sum(loss, tf.ones_like(logits), logits)

    c = tmg.make_train_step(critic, optimizers[0], None, strategy, forward=critic_loss)
    g = tmg.make_train_step(generator, optimizers[1], None, strategy, forward=generator_loss)
    step = tmg.chain_steps(c, g, names=("c", "g"))
    print(tmg.fit(generator, real, step=step, batch_size=32, epochs=3, verbose=0).history)
    return generator.get_weights() + critic.get_weights()


devices = tmg.devices.list_logical_devices("GPU")
devices = devices if len(devices) > 1 else tmg.split_device("CPU:0", parts=3)
trained = [train(tmg.create_strategy(devices=devices[:n])) for n in (1, len(devices))]
difference = max(np.abs(a - b).max() for a, b in zip(*trained, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
