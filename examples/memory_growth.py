"""Memory that grows as it is needed, on a GPU that other programs use too.

The usual answer is ``tf.config.experimental.set_memory_growth(gpus[0], True)`` in a ``try`` that
prints the error. Without a GPU that is an IndexError; with two, setting one makes TensorFlow stop
at the first operation; after any line that started the devices it has no effect.

``enable_memory_growth`` sets all GPUs or none, does nothing where there is none, and anything that
comes too late or contradicts it is an error that says which line to move.
"""

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

growing = tmg.enable_memory_growth()  # directly after the imports
gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    tmg.fit(model, x, y, batch_size=64, shuffle=False, verbose=0)
    return model.get_weights()


weights = train(tmg.create_strategy(devices=devices))
for gpu in growing:
    used = tf.config.experimental.get_memory_info(gpu.name)["peak"]
    print(f"{gpu.name} {gpu.description}: at most {used / 1024**2:.1f} MiB used")
assert tmg.enable_memory_growth() == growing  # again: nothing changes
try:
    tmg.split_device("CPU:0", parts=3)  # the devices have started
except tmg.DevicesInitializedError as error:
    print(f"refused: {error}")
else:
    raise AssertionError("a setting that comes too late must be refused")

reference = train(tmg.create_strategy(devices=devices[:1]))
difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
print(f"{len(devices)} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
