"""A TPU where there is one, and what else is here where there is none.

The usual answer puts ``TPUClusterResolver()`` into ``try`` and ``except ValueError``. That covers a
machine without a TPU, not an address where nothing answers any more: there TensorFlow waits for
minutes. ``MirroredStrategy()`` in the ``except`` branch then trains on the CPU where there is no
GPU, and nobody is told why.

``create_strategy(prefer="tpu")`` asks the address for some seconds, then takes several workers,
several GPUs, one GPU or the CPU, and warns with the reason. ``fallback=False`` makes it an error.
"""

import os
import time
import warnings

import keras
import numpy as np

import tfmultigpu as tmg

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


print(tmg.plan_strategy(prefer="tpu"))
began = time.monotonic()
before = os.environ.get("TPU_NAME", "")
os.environ["TPU_NAME"] = "grpc://127.0.0.1:1"
try:
    tmg.create_strategy(prefer="tpu", fallback=False)
except tmg.errors.StrategyUnavailableError as error:
    print(f"after {time.monotonic() - began:.1f} s: {error}")
os.environ["TPU_NAME"] = before

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", tmg.errors.StrategyFallbackWarning)
    strategy = tmg.create_strategy(prefer="tpu")
for warning in caught:
    print(f"warned: {warning.message}")

weights = train(strategy)
reference = train(tmg.create_strategy(prefer="one_device"))
difference = max(np.abs(a - b).max() for a, b in zip(weights, reference, strict=True))
replicas = strategy.num_replicas_in_sync
print(f"{replicas} replicas, largest weight difference to one device: {difference:.1e}")
assert difference < 1e-3
