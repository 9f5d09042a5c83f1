"""A model that does not fit on one device: each large weight on one device alone.

The usual answer is that model parallelism is a project of its own: DTensor takes raw TensorFlow,
and the ``ModelParallel`` of Keras works on JAX. ``MirroredStrategy`` keeps all weights, gradients
and optimizer state on each GPU.

With ``tmg.sharded_variables()`` each large weight lives on one device. All replicas read it there
while they compute its layer. Its gradients are added there, and its optimizer state is there too.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

WIDTH = 256

rng = np.random.default_rng(0)
x = rng.normal(size=(197, WIDTH)).astype("float32")  # the last batch has 5 rows
y = (x[:, :3] > 0).astype("float32")


def build():
    hidden = [keras.layers.Dense(WIDTH, "tanh") for _ in range(4)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(3)])


def train(strategy, sharded):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        if sharded:
            with tmg.sharded_variables():
                model = build()
        else:
            model = build()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    tmg.fit(model, x, y, batch_size=64, epochs=2, verbose=0)
    return model


if __name__ == "__main__":
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = list(gpus) if len(gpus) > 1 else list(tmg.split_device("CPU:0", parts=4))
    strategy = tmg.create_strategy(devices=devices)

    model = train(strategy, sharded=True)
    kernels = [layer.kernel.value for layer in model.layers[:4]]
    places = [tmg.devices.names.parse_device_name(kernel.device) for kernel in kernels]
    print(f"kernels on {', '.join(places)}")

    one = train(tmg.create_strategy(devices=devices[:1]), sharded=False)
    apart = max(
        float(np.max(np.abs(a - b)))
        for a, b in zip(model.get_weights(), one.get_weights(), strict=True)
    )
    assert apart < 1e-3, apart
    print(f"{len(devices)} replicas, largest weight difference to one device: {apart:.1e}")
