"""Devices named one by one, and how they exchange gradients.

The usual answer is ``MirroredStrategy(["/gpu:0", "/gpu:1"],
cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())``. Where one of the GPUs does not exist
TensorFlow does not say so: it trains on the CPU, or waits for ever at the first step. Over an odd
number of devices hierarchical copy leaves out the gradients of the last one.

``create_strategy`` checks the names first and takes the communication only where it can work. The
loop below runs every communication this machine has, one strategy after the other in one process.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")  # 3 batches of 64 and one of 11
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=64):
        step(batch)
    return model.get_weights()


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus[:2] if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)

    try:
        tmg.create_strategy(devices=["GPU:0", "GPU:99"])
    except tmg.DeviceNotFoundError as error:
        print(f"refused at once: {error}")

    reference = train(tmg.create_strategy(devices=devices[:1]))
    largest = 0.0
    for communication in ("hierarchical_copy", "one_device", "nccl" if len(gpus) > 1 else "ring"):
        strategy = tmg.create_strategy(devices=devices, communication=communication, fallback=False)
        weights = train(strategy)
        difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
        print(f"  {communication}: largest weight difference to one device {difference:.1e}")
        largest = max(largest, difference)
    print(f"{', '.join(devices)}, largest weight difference to one device: {largest:.1e}")
    assert largest < 1e-3


if __name__ == "__main__":
    main()
