"""The demo: Keras' ``fit`` on one device against ``tmg.fit`` on several, on handwritten digits."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.addons.testing.invariance import difference
from tfmultigpu.arguments import check_count

# Another order of addition changes the last bit of a float32. A mistake in scaling a loss changes
# the third digit.
TOLERANCE = {"CPU": 1e-5, "GPU": 1e-4}


def run_demo(replicas: int | None = None, epochs: int = 10) -> bool:
    """Trains on one device and on several, prints both, and returns whether they agree.

    Args:
        replicas: Number of replicas; None: one per GPU, or 4 virtual CPUs.
        epochs: Number of epochs.
    """
    check_count("epochs", epochs, error=tmg.TfMultiGpuError)
    x, y = load_digits()
    devices = choose_devices(replicas)
    several = len(devices)
    # The replicas do not divide a batch, and the last batch has fewer examples than replicas.
    size = 64 + (64 % several == 0)
    rows = 1500 // size * size + min(1500 % size, several - 1)
    print(f"{rows} images: batches of {size}, and a last one of {rows % size}; on {devices}.")
    data = [tf.data.Dataset.from_tensor_slices((x[s], y[s])).batch(size)
            for s in (slice(rows), slice(1500, None))]  # fmt: skip
    one, many = train(devices[:1], data, epochs), train(devices, data, epochs)
    tolerance = TOLERANCE[devices[0][:3]]
    differences = [difference(one[name], many[name], name) for name in one]
    print(f"\n{'':24}{'one device':>12}{f'{several} replicas':>12}{'difference':>12}")
    for this in differences:
        print(f"{this.quantity:24}{this.expected:12.6f}{this.actual:12.6f}{this.amount:12.0e}")
    agree = all(this.amount <= tolerance for this in differences)
    print(f"\nThe answers {'agree to' if agree else 'DIFFER by more than'} {tolerance:.0e}.")
    return agree


def load_digits() -> tuple[Any, Any]:
    """Returns images of shape [1797, 8, 8, 1] and their digits, in a fixed random order."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError('The digits need scikit-learn: pip install "tfmultigpu[demo]"') from error
    x, y = datasets.load_digits(return_X_y=True)
    # The last images of the file are by other writers than the first.
    order = np.random.default_rng(1).permutation(len(x))
    return x[order].reshape(-1, 8, 8, 1).astype("float32") / 16, y[order]


def choose_devices(replicas: int | None) -> tuple[str, ...]:
    """Returns the devices to train on: GPUs if there are enough, else virtual CPUs."""
    gpus = tmg.list_devices("GPU")
    if len(gpus) < max(2, replicas or 0):
        return tmg.split_device("CPU:0", parts=replicas or 4)
    tmg.enable_memory_growth()
    # Rounding to TF32 depends on the shape of a shard, which differs here.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    return tuple(gpu.name for gpu in gpus[:replicas])


def train(devices: tuple[str, ...], data: Any, epochs: int) -> dict[str, Any]:
    """Trains without ReLU and max pooling, whose gradients jump at a last bit."""
    several = len(devices) > 1
    print(f"\n{f'tmg.fit on {len(devices)} replicas' if several else 'Keras on one device'}:")
    keras.utils.set_random_seed(1)
    strategy = tmg.create_strategy(prefer="mirrored", devices=devices) if several else None
    with tf.device(devices[0]) if strategy is None else strategy.scope():
        convolution = keras.layers.Conv2D(16, 3, activation="tanh")
        dense = keras.layers.Dense(10, kernel_regularizer="l2")
        layers = [convolution, keras.layers.AveragePooling2D(2), keras.layers.Flatten(), dense]
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
        if strategy is None:
            logs = model.fit(data[0], epochs=epochs), model.evaluate(data[1], return_dict=True)
        else:
            logs = tmg.fit(model, data[0], epochs=epochs), tmg.evaluate(model, data[1])
    return {
        "training loss": logs[0].history["loss"][-1],
        "test loss": logs[1]["loss"],
        "test accuracy": logs[1]["accuracy"],
        "optimizer steps": float(model.optimizer.iterations.numpy()),
        "weight apart the most": np.concatenate([w.ravel() for w in model.get_weights()]),
    }
