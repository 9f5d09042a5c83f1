"""A variational autoencoder: a loss of its own, noise in the model, a part of it in the logs.

The usual answer overrides ``train_step`` and takes ``ops.mean`` of the losses. Under
``MirroredStrategy`` the optimizer then adds the means of the replicas: N times the gradient, which
Adam hides and SGD does not. Every replica draws the same noise for other images.

``forward`` returns a sum and the number of rows. ``fit`` adds both over the replicas and divides
once, and shows the metric beside the loss. Noise is what one device would draw for each row.
"""

import keras
import numpy as np
from keras import layers, ops

import tfmultigpu as tmg

rng = np.random.default_rng(0)
place = rng.integers(0, 4, size=(210, 1, 1)) * 2  # a bright bar at one of four places
images = (np.abs(np.arange(8) - place) < 2) * rng.uniform(0.5, 1.0, size=(210, 8, 1))
images = images.astype("float32").reshape(210, 64)  # 6 batches of 32 and one of 18


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(32, "tanh"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(32, "tanh"), layers.Dense(64, "sigmoid")])
        self.seeds = keras.random.SeedGenerator(1)  # an attribute, so that checkpoints have it
        self.kl = keras.metrics.Mean(name="kl")

    def call(self, inputs):
        mean, log_variance = ops.split(self.encoder(inputs), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(log_variance / 2) * noise), mean, log_variance


def forward(vae, batch, training):
    decoded, mean, log_variance = vae(batch, training=training)
    reconstruction = 64 * keras.losses.binary_crossentropy(batch, decoded)  # one value per row
    kl = -0.5 * ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), axis=-1)
    vae.kl.update_state(kl)
    return tmg.LossSum(ops.sum(reconstruction + kl), ops.shape(batch)[0])


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        vae = VAE()
        vae.compile(keras.optimizers.SGD(2e-3, momentum=0.9))  # the loss is in forward
    print(tmg.fit(vae, images, forward=forward, batch_size=32, epochs=3, verbose=0).history)
    return vae.get_weights()


devices = tmg.devices.list_logical_devices("GPU")
devices = devices if len(devices) > 1 else tmg.split_device("CPU:0", parts=3)
trained = [train(tmg.create_strategy(devices=devices[:n])) for n in (1, len(devices))]
difference = max(np.abs(a - b).max() for a, b in zip(*trained, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
