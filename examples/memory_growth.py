"""Memory that grows as it is needed, on a GPU that other programs use too.

The usual answer is ``tf.config.experimental.set_memory_growth(gpus[0], True)`` in a ``try`` that
prints the error. Without a GPU ``gpus[0]`` is an IndexError; with two, setting one of them makes
TensorFlow stop at the first operation ("Memory growth cannot differ between GPU devices"); after
any other line has started the devices it has no effect, and the printed error is lost among others.
Together with a memory limit or a split device TensorFlow drops growth without a word.

``enable_memory_growth`` sets all GPUs or none, does nothing where there is none, and anything that
comes too late or contradicts it is an error that says which line to move.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

growing = tmg.enable_memory_growth()  # directly after the imports

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def main():
    for gpu in growing:
        free = "unknown" if gpu.memory_free is None else f"{gpu.memory_free / 1024**3:.1f} GiB"
        print(f"{gpu.name} {gpu.description}: takes memory as it needs it, free now: {free}")
    devices = tmg.devices.list_logical_devices("GPU") or tmg.split_device("CPU:0", parts=2)

    strategy = tmg.create_strategy(devices=devices)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    data = tmg.distribute_dataset((x, y), strategy, batch_size=64)
    losses = [float(step(batch)["loss"]) for _ in range(3) for batch in data]

    names = [gpu.name for gpu in growing]
    assert [gpu.name for gpu in tmg.enable_memory_growth()] == names  # again: nothing changes
    for name in names:
        used = tf.config.experimental.get_memory_info(name)["peak"]
        print(f"{name}: at most {used / 1024**2:.1f} MiB used")
    try:
        tmg.split_device("CPU:0", parts=3)  # the devices have started
    except tmg.TfMultiGpuError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a setting that comes too late must be refused")
    print(f"memory growth on {len(names)} GPUs, trained on {', '.join(devices)}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
