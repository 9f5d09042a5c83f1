"""Fine-tuning: train a new head on a frozen backbone, then both, at a lower rate.

The usual answer is right on one device. On several, ``fit`` counts a last batch that does not
divide wrongly, and each BatchNormalization of a backbone that came from somewhere sees the rows of
its replica only. With a backbone that was loaded outside the scope it stops, with a message about
``colocate_vars_with``. An optimizer made before the backbone is unfrozen does not know its weights.

``fit`` trains what is not frozen when it is called. A ``compile`` in the scope after unfreezing
makes the new optimizer. ``synchronize_batch_norm`` makes one batch of all replicas' rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np

import tfmultigpu as tmg

BATCH = 32

rng = np.random.default_rng(0)
images = rng.normal(size=(210, 8, 8, 1)).astype("float32")  # 180 to train: a last batch of 20
rows, columns = images.mean(axis=(2, 3)), images.mean(axis=(1, 3))
old_task, new_task = rows.argmax(axis=1), (columns.argmax(axis=1) > 3).astype("int32")


def save_some_backbone(path):
    layers = keras.layers
    keras.utils.set_random_seed(0)
    hidden = [
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Flatten(),
    ]
    backbone = keras.Sequential([keras.Input((8, 8, 1)), *hidden], name="backbone")
    model = keras.Sequential([backbone, layers.Dense(8)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tmg.fit(model, images, old_task, epochs=2, verbose=0)
    backbone.save(path)


def train(strategy, path):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"batch_size": BATCH, "validation_split": 1 / 7, "verbose": 0}
    with strategy.scope():  # loading makes variables
        keras.utils.set_random_seed(1)
        backbone = keras.models.load_model(path)
        model = keras.Sequential([backbone, keras.layers.Dropout(0.2), keras.layers.Dense(2)])
        tmg.synchronize_batch_norm(model)

        backbone.trainable = False  # its BatchNormalization uses the statistics it came with
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-4), loss, metrics=["accuracy"])
    before = backbone.get_weights()
    head = tmg.fit(model, images, new_task, epochs=3, **options)
    assert all(np.array_equal(a, b) for a, b in zip(backbone.get_weights(), before, strict=True))

    with strategy.scope():
        backbone.trainable = True
        model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-4), loss, metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    both = tmg.fit(model, images, new_task, initial_epoch=3, epochs=6, callbacks=[stop], **options)
    return model.get_weights(), head.history["loss"] + both.history["loss"]


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=3)
    single = tmg.create_strategy(devices=devices[:1])
    differences = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "backbone.keras"
        with single.scope():
            save_some_backbone(path)
        reference, expected = train(single, path)
        for count in sorted({2, len(devices)}):
            weights, losses = train(tmg.create_strategy(devices=devices[:count]), path)
            differences += [np.abs(a - b).max() for a, b in zip(weights, reference, strict=True)]
            assert np.allclose(losses, expected, atol=1e-3)
    print("  losses " + ", ".join(f"{value:.3f}" for value in losses))
    counts = " and ".join(str(count) for count in sorted({2, len(devices)}))
    print(f"{counts} replicas, largest weight difference to one device: {max(differences):.1e}")
    assert max(differences) < 1e-3


if __name__ == "__main__":
    main()
