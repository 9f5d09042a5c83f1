"""A variational autoencoder: a loss of its own, noise in the model, each part in the logs.

The usual answer overrides ``train_step`` and takes ``ops.mean`` of the losses. Under
``MirroredStrategy`` the optimizer then adds the means of the replicas: N times the gradient, which
Adam hides and SGD does not. Every replica draws the same noise for other images. A tracker for
each part of the loss has to be made, updated, reset and listed by hand.

``forward`` returns sums and the number of rows. ``fit`` adds both over the replicas, divides once,
and shows the other values beside the loss. Noise is what one device would draw for each row.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfmultigpu as tmg

BATCH, EPOCHS, LATENT = 32, 3, 2

rng = np.random.default_rng(0)
place = rng.integers(0, 4, size=(210, 1, 1)) * 2  # a bright bar at one of four places
images = (np.abs(np.arange(8) - place) < 2) * rng.uniform(0.5, 1.0, size=(210, 8, 1))
images = images.astype("float32").reshape(210, 64)  # 180 to train: 5 batches of 32 and one of 20


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        hidden, statistics = keras.layers.Dense(32, "relu"), keras.layers.Dense(2 * LATENT)
        self.encoder = keras.Sequential([hidden, statistics])
        hidden, pixels = keras.layers.Dense(32, "relu"), keras.layers.Dense(64, "sigmoid")
        self.decoder = keras.Sequential([hidden, pixels])
        self.seeds = keras.random.SeedGenerator(1)  # an attribute, so that checkpoints have it

    def call(self, inputs):
        mean, log_variance = ops.split(self.encoder(inputs), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(log_variance / 2) * noise), mean, log_variance


def forward(vae, batch, training):
    decoded, mean, log_variance = vae(batch, training=training)
    reconstruction = 64 * keras.losses.binary_crossentropy(batch, decoded)  # one value per row
    kl = -0.5 * ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), axis=-1)
    rows = tf.cast(tf.shape(batch)[0], tf.float32)
    parts = {"reconstruction": (ops.sum(reconstruction), rows), "kl": (ops.sum(kl), rows)}
    return tmg.LossSum(ops.sum(reconstruction + kl), rows), parts


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        vae = VAE()
        vae.compile(keras.optimizers.SGD(2e-3, momentum=0.9))  # the loss is in forward
    history = tmg.fit(
        vae,
        images[:180],
        forward=forward,
        batch_size=BATCH,
        epochs=EPOCHS,
        validation_data=images[180:],
        verbose=0,
    )
    return vae.get_weights(), history.history


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
