"""A TPU where there is one, and what else is here where there is none.

The usual answer puts ``TPUClusterResolver()`` into ``try`` and ``except ValueError``. That covers a
machine without a TPU, and not an address where nothing answers any more (``TPU_NAME`` of a machine
that was shut down): there TensorFlow waits for minutes before it says so. ``MirroredStrategy()`` in
the ``except`` branch then trains on the CPU where there is no GPU, and nobody is told why.

``create_strategy(prefer="tpu")`` asks the address itself, for at most some seconds, then takes
several workers, several GPUs, one GPU or the CPU, and says why. ``fallback=False`` makes it an
error. The training code is the same on all of them.
"""

from __future__ import annotations

import time
import warnings

import keras
import numpy as np

import tfmultigpu as tmg

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")


def strategy_and_reason():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tmg.errors.StrategyFallbackWarning)
        strategy = tmg.create_strategy(prefer="tpu")
    return strategy, [str(warning.message) for warning in caught]


def main():
    print(tmg.plan_strategy(prefer="tpu"))

    began = time.monotonic()
    try:  # an address where nothing answers; fallback=False: an error instead of a warning
        tmg.create_strategy(prefer="tpu", devices="grpc://127.0.0.1:1", fallback=False)
    except tmg.errors.StrategyUnavailableError as error:
        print(f"after {time.monotonic() - began:.1f} s: {error}")
    assert time.monotonic() - began < 10

    strategy, reasons = strategy_and_reason()
    for reason in reasons:
        print(f"warned: {reason}")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.05)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    data = tmg.distribute_dataset((x, y), strategy, batch_size=64)
    losses = [float(step(batch)["loss"]) for _ in range(3) for batch in data]
    kind = type(strategy).__name__
    print(f"trained on {kind}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
