"""GPUs of different memory: each gets a share of the batch that it can hold.

The usual answer gives every GPU the same number of rows, so the smallest decides for all, or takes
the mean loss of unequal parts: a row on the GPU with few rows then counts more.

``plan_shares`` divides the rows in proportion to memory (or another capacity), and
``distribute_dataset(shares=...)`` cuts every batch like that, the partial one too. Where a small
GPU is fast, all take an equal share in parts that it can hold (``micro_batches``): the same result.
"""

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")  # 3 batches of 64 and one of 11
y = (x @ rng.normal(size=16) > 0).astype("int32")


def memory_of(devices):
    """Bytes of each device, asked of the driver (needs the extra nvml), else an example's."""
    known = {device.name: device.memory_total for device in tmg.list_devices()}
    physical = tmg.devices.logical_to_physical()
    memory = [known[physical[name]] for name in devices]
    return memory if all(memory) else [24 * 1024**3] + [8 * 1024**3] * (len(devices) - 1)


def train(strategy, shares=None, micro_batches=1):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy, micro_batches=micro_batches)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=64, shares=shares):
        step(batch)
    return model.get_weights()


gpus = tmg.devices.list_logical_devices("GPU")
devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
strategy = tmg.create_strategy(devices=devices)
reference = train(tmg.create_strategy(devices=devices[:1]))
shares = tmg.data.plan_shares(64, memory_of(devices))  # 48 and 16 rows of 64
alike = tmg.data.plan_shares(64, [1] * len(devices))  # as fast as each other ...
parts = max(-(-rows // holds) for rows, holds in zip(alike, shares, strict=True))  # ... in parts
differences = []
for cut in ((shares, 1), (alike, parts)):
    pairs = zip(train(strategy, *cut), reference, strict=True)
    differences.append(max(np.abs(a - b).max() for a, b in pairs))
    print(f"shares {cut[0]}, micro-batches {cut[1]}: {differences[-1]:.1e}")
print(f"{len(devices)} replicas, largest weight difference to one device: {max(differences):.1e}")
assert max(differences) < 1e-3
