"""Contrastive pretraining: each image finds its other view among all images of the batch.

The usual answer computes the matrix of similarities on each replica. With N replicas an image is
compared with 1/N of the batch: another loss, easier with every GPU, which trains and looks right.
``all_gather`` gives all rows in a loop written by hand, where ``tf.reduce_mean`` over the rows of a
replica is the next mistake: it counts a short last batch wrongly.

``gather_rows`` gives each replica the rows of all, once each, with gradients, and ``tmg.rows`` says
which of them are its own. Flips and noise of a row do not depend on the number of replicas.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

BATCH, EPOCHS, TEMPERATURE = 32, 3, 0.2

rng = np.random.default_rng(0)
images = rng.normal(size=(150, 8, 8, 1)).astype("float32")  # 4 batches of 32 and one of 22
images += np.repeat(rng.normal(size=(150, 1, 1, 1)), 8, axis=2).astype("float32")


def compiled_model():
    layers = keras.layers
    augment = [layers.RandomFlip("horizontal"), layers.GaussianNoise(0.3)]
    encoder = [layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D()]
    # Without a bias: all embeddings are shifted alike by it, which the loss does not see.
    head = [layers.Dense(16, "relu"), layers.Dense(8, use_bias=False)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *augment, *encoder, *head])
    model.compile(keras.optimizers.Adam(1e-3))
    return model


def contrast(first, second):
    """Returns for each row of this replica how well it finds its other view among all rows."""
    first, second = tf.math.l2_normalize(first, -1), tf.math.l2_normalize(second, -1)
    every_first, every_second = tmg.gather_rows((first, second))
    own = tmg.rows()
    here = tf.cast(own.first + tf.range(own.count), tf.int32)
    rows = tf.shape(every_first)[0]

    def find(views, others, same):
        logits = tf.matmul(views, tf.concat([others, same], 0), transpose_b=True) / TEMPERATURE
        logits -= 1e9 * tf.one_hot(rows + here, 2 * rows)  # not itself
        return tf.nn.sparse_softmax_cross_entropy_with_logits(here, logits)

    return (find(first, every_second, every_first) + find(second, every_first, every_second)) / 2


def forward(model, batch, training):
    first, second = model(batch, training=True), model(batch, training=True)  # two random views
    return tmg.loss_sum(contrast, first, second)


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = compiled_model()
    options = {"batch_size": BATCH, "epochs": EPOCHS, "validation_split": 0.2, "verbose": 0}
    history = tmg.fit(model, images, forward=forward, **options)
    return model.get_weights(), history.history


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
