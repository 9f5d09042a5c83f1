"""A GPU that is missing, taken or too small: go on with what there is, and say so.

The usual answer wraps everything in ``try`` and ``except RuntimeError`` and then takes
``OneDeviceStrategy("/gpu:0")``. TensorFlow raises nothing where a device is missing: it hangs at
the first step or uses the CPU. A GPU that another program has filled fails much later, out of
memory, and starting again on one device with the whole batch fails once more.

Missing: ``create_strategy`` raises before TensorFlow is asked. Taken: ``list_devices`` tells what
is free (needs the extra nvml). Impossible here: ``fallback=True`` takes the next best and warns.
Out of memory: the step changed nothing, so take the batch in more parts; the result is the same.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

GIB = 1024**3
ROWS_THAT_FIT = 32  # on the devices simulated here

rng = np.random.default_rng(0)
x = rng.normal(size=(125, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


class Hungry(keras.layers.Layer):
    """Asks for more memory than any machine has when too many rows come at once."""

    def call(self, inputs):
        many = tf.shape(inputs)[0] > ROWS_THAT_FIT
        return inputs + tf.reduce_max(
            tf.fill([tf.where(many, tf.constant(2**50, tf.int64), 1)], 0.0)
        )


def strategy_or_one_device(names):
    try:
        return tmg.create_strategy(devices=names)
    except tmg.DeviceNotFoundError as error:
        print(f"one device instead: {error}")
        return tmg.create_strategy(prefer="one_device")


def build(strategy, *layers):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(32, "relu"), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((16,)), *layers, *dense])
        return model, keras.optimizers.SGD(0.05)


def main():
    gpus = zip(tf.config.list_physical_devices("GPU"), tmg.list_devices("GPU"), strict=True)
    usable = [gpu for gpu, facts in gpus if (facts.memory_free or 4 * GIB) >= 4 * GIB]
    tf.config.set_visible_devices(usable, "GPU")  # the others, which are taken, are not started
    devices = tmg.devices.list_logical_devices("GPU")
    devices = devices if len(devices) > 1 else tmg.split_device("CPU:0", parts=2)

    single = strategy_or_one_device(["GPU:98", "GPU:99"])
    strategy = tmg.create_strategy(devices=devices, communication="nccl", fallback=True)

    model, optimizer = build(strategy, Hungry())
    before = model.get_weights()
    for micro_batches in (1, 2, 4, 8, 16):
        step = tmg.make_train_step(model, optimizer, "mse", strategy, micro_batches=micro_batches)
        try:
            step((x, y))
        except tmg.OutOfMemoryError as error:
            print(f"micro_batches={micro_batches}: {str(error).split('. ')[0]}.")
            assert optimizer.iterations == 0
            assert all(map(np.array_equal, model.get_weights(), before))
        else:
            break

    reference, optimizer = build(single)
    tmg.make_train_step(reference, optimizer, "mse", single)((x, y))
    pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
    difference = max(np.abs(a - b).max() for a, b in pairs)
    print(f"{len(x)} rows on {len(devices)} devices fit with micro_batches={micro_batches}")
    print(f"largest weight difference to one device with enough memory: {difference:.1e}")
    assert difference < 1e-3


if __name__ == "__main__":
    main()
