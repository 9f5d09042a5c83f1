"""Devices named one by one, and how they exchange gradients.

The usual answer is ``MirroredStrategy(["/gpu:0", "/gpu:1"],
cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())``. Where one of the GPUs does not exist
TensorFlow does not say so: it trains on the CPU, or waits for ever at the first step. Over an odd
number of devices hierarchical copy leaves out the gradients of the last one.

``create_strategy`` checks the names first and takes the communication only where it can work.
"""

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")  # 3 batches of 64 and one of 11
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=64):
        step(batch)
    return model.get_weights()


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus[:2] if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
try:
    tmg.create_strategy(devices=["GPU:0", "GPU:99"])
except tmg.DeviceNotFoundError as error:
    print(f"refused at once: {error}")

reference = train(tmg.create_strategy(devices=devices[:1]))
differences = []
for communication in ("hierarchical_copy", "one_device", *(["nccl"] if len(gpus) > 1 else [])):
    strategy = tmg.create_strategy(devices=devices, communication=communication, fallback=False)
    pairs = zip(train(strategy), reference, strict=True)
    differences.append(max(np.abs(a - b).max() for a, b in pairs))
    print(f"  {communication}: {differences[-1]:.1e}")
print(f"{devices}, largest weight difference to one device: {max(differences):.1e}")
assert max(differences) < 1e-3
