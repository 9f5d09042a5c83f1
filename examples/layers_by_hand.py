"""Layers placed by hand: the blocks of one large model on several devices, as a pipeline.

The usual advice, ``with tf.device(...)`` around each block, places the weights. TensorFlow then
computes everything on the first device: it copies the weights there, and all activations and
gradients stay there. ``with tf.device(...)`` in ``call`` moves the forward pass only.

With ``tmg.sharding.LayersByHand`` a step computes each layer where its weights are, forward and
backward, and with ``pipeline=True`` the devices work on several micro-batches at one time.
"""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

WIDTH = 128

rng = np.random.default_rng(0)
x = rng.normal(size=(197, WIDTH)).astype("float32")  # the last batch has 5 rows
y = (x[:, :3] > 0).astype("float32")
batches = [(x[i : i + 64], y[i : i + 64]) for i in range(0, len(x), 64)]


def build(devices):
    hidden = inputs = keras.Input((WIDTH,))
    for device in devices:
        with tf.device(device):  # a layer gets its weights where it is first called
            for _ in range(2):
                hidden = keras.layers.Dense(WIDTH, "tanh")(hidden)
    with tf.device(devices[-1]):
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def train(devices, folder, epochs, **options):
    keras.utils.set_random_seed(0)
    model, optimizer = build(devices), keras.optimizers.Adam(0.001)
    step = tmg.make_train_step(model, optimizer, "mse", **options)  # one replica
    checkpoints = tmg.Checkpoints(folder, model, optimizer)
    for number in range(checkpoints.restore() or 0, epochs * len(batches)):
        step(batches[number % len(batches)])
    checkpoints.save()
    return model


if __name__ == "__main__":
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = list(gpus) if len(gpus) > 1 else list(tmg.split_device("CPU:0", parts=2))

    with tempfile.TemporaryDirectory() as folder:
        by_hand = tmg.sharding.LayersByHand(pipeline=True)
        options = {"micro_batches": 8, "features": [by_hand]}
        train(devices, f"{folder}/several", epochs=1, **options)
        model = train(devices, f"{folder}/several", epochs=2, **options)  # resumes
        one = train(devices[:1] * len(devices), f"{folder}/one", epochs=2)
    kernels = [layer.kernel.value for layer in model.layers[1:]]
    places = [tmg.devices.names.parse_device_name(kernel.device) for kernel in kernels]
    print(f"kernels on {', '.join(places)}")

    apart = max(
        float(np.max(np.abs(a - b)))
        for a, b in zip(model.get_weights(), one.get_weights(), strict=True)
    )
    assert apart < 1e-3, apart
    print(f"{len(devices)} devices, largest weight difference to one device: {apart:.1e}")
