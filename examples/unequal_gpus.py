"""GPUs of different memory: each gets a share of the batch that it can hold.

The usual answer gives every GPU the same number of rows, so the smallest decides for all, or cuts
the batch by hand. By hand the mean loss of each part is taken, and a row on the GPU with few rows
then counts more than a row on the other.

``plan_shares`` divides the rows in proportion to memory (or to any other capacity), and
``distribute_dataset(shares=...)`` cuts every batch like that, the partial one at the end too. Rows
count the same wherever they are computed.

Where a small GPU is fast, shares go by speed instead, and it computes its share in more parts than
the others (``plan_micro_batches``): never more rows at once than it holds, the same result again.
"""

from __future__ import annotations

import keras
import numpy as np

import tfmultigpu as tmg

BATCH = 64  # of all GPUs together
GIB = 1024**3

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")  # 3 batches of 64 and one of 11
y = (x @ rng.normal(size=16) > 0).astype("int32")


def memory_of(devices):
    """Bytes of each device, asked of the driver (needs the extra nvml), else an example's."""
    known = {device.name: device.memory_total for device in tmg.list_devices()}
    physical = tmg.devices.logical_to_physical()
    memory = [known[physical[name]] for name in devices]
    return memory if all(memory) else [24 * GIB] + [8 * GIB] * (len(devices) - 1)


def train(strategy, shares=None, micro_batches=1):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = tmg.make_train_step(model, optimizer, loss, strategy, micro_batches=micro_batches)
    for batch in tmg.distribute_dataset((x, y), strategy, batch_size=BATCH, shares=shares):
        rows = [len(labels) for labels in strategy.experimental_local_results(batch[1])]
        print(f"  rows on each: {rows}")
        step(batch)
    return model.get_weights()


def main():
    gpus = tmg.devices.list_logical_devices("GPU")
    devices = gpus if len(gpus) > 1 else tmg.split_device("CPU:0", parts=2)
    memory = memory_of(devices)
    shares = tmg.plan_shares(BATCH, memory)
    for name, size, share in zip(devices, memory, shares, strict=True):
        print(f"{name} has {size / GIB:.0f} GiB and takes {share} of {BATCH} rows")
    strategy = tmg.create_strategy(devices=devices)
    weights = train(strategy, shares)
    alike = tmg.plan_shares(BATCH, [1] * len(devices))  # as fast as each other ...
    parts = tmg.data.plan_micro_batches(alike, shares)  # ... and each holds so many rows at once
    weights_of_parts = train(strategy, alike, parts)
    print("one device:")
    reference = train(tmg.create_strategy(devices=devices[:1]))
    for cut, found in (
        (f"shares {alike} in {parts} micro-batches", weights_of_parts),
        (f"shares {shares}", weights),
    ):
        difference = max(np.abs(a - b).max() for a, b in zip(found, reference, strict=True))
        print(f"{cut}, largest weight difference to one device: {difference:.1e}")
        assert difference < 1e-3
    assert sum(shares) == BATCH


if __name__ == "__main__":
    main()
