"""``plan_memory`` against what TensorFlow allocates: the bound of a step, for eight networks.

``python benchmarks/plan_memory.py`` takes about a minute on two idle cores. It prints for each
network the bytes that are kept, by the plan and measured, and what a step needs besides: the bound
of the plan, the measured peak, and the bound as a share of it. ``NAME ...`` measures some alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

# The allocator of CPUs counts what it gives out, and its peak, only if it is this one.
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
# TensorFlow takes the kernels of oneDNN only where it knows the processor; the others copy more: a
# transposed convolution there needs five times what the plan can know of.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfmultigpu as tmg

MIB = 1024**2
ALL = 2**28  # Numbers that are allocated once: then what is free is one piece, with one end.


def mlp() -> tuple[Any, int]:
    """Returns a model and the rows of a batch."""
    hidden = [layers.Dense(256, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((256,)), *hidden]), 512


def wide() -> tuple[Any, int]:
    """Returns a network whose weights are larger than its activations."""
    hidden = [layers.Dense(2048, "gelu"), layers.Dense(2048, "tanh")]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(8)]), 16


def cnn() -> tuple[Any, int]:
    """Returns a small convolutional network."""
    hidden = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPool2D()]
    hidden += [layers.Conv2D(64, 3, activation="relu"), layers.Flatten(), layers.Dense(10)]
    return keras.Sequential([keras.Input((32, 32, 3)), *hidden]), 64


def transformer() -> tuple[Any, int]:
    """Returns two blocks with attention."""
    x = inputs = keras.Input((48, 64))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        wide = layers.Dense(256, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(layers.Dense(64)(wide)))
    return keras.Model(inputs, x), 32


def lstm() -> tuple[Any, int]:
    """Returns two recurrent layers."""
    hidden = [layers.LSTM(64, return_sequences=True), layers.LSTM(64), layers.Dense(4)]
    return keras.Sequential([keras.Input((40, 32)), *hidden]), 64


def embedding() -> tuple[Any, int]:
    """Returns a table of 20,000 rows and a few layers."""
    hidden = [layers.Embedding(20_000, 64), layers.Dense(64, "relu"), layers.Flatten()]
    return keras.Sequential([keras.Input((32,), dtype="int32"), *hidden, layers.Dense(8)]), 64


def residual() -> tuple[Any, int]:
    """Returns three residual blocks with batch normalization."""
    x = inputs = keras.Input((16, 16, 32))
    for _ in range(3):
        y = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(32, 3, padding="same")(y))
        x = layers.ReLU()(x + y)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))), 64


def autoencoder() -> tuple[Any, int]:
    """Returns convolutions to a vector and back."""
    down = [layers.Conv2D(size, 3, 2, "same", activation="relu") for size in (16, 32)]
    middle = [layers.Flatten(), layers.Dense(32), layers.Dense(7 * 7 * 32)]
    up = [layers.Reshape((7, 7, 32)), layers.Conv2DTranspose(16, 3, 2, "same", activation="relu")]
    up.append(layers.Conv2DTranspose(1, 3, 2, "same", activation="sigmoid"))
    return keras.Sequential([keras.Input((28, 28, 1)), *down, *middle, *up]), 64


NETWORKS: dict[str, Callable[[], tuple[Any, int]]] = {
    one.__name__: one
    for one in (mlp, wide, cnn, transformer, lstm, embedding, residual, autoencoder)
}


def measure(name: str) -> tuple[int, int, int, int]:
    """Returns bytes that are kept, by the plan and measured, then a step's: bound and peak."""
    before = _taken("current")
    model, rows = NETWORKS[name]()
    step = tmg.make_train_step(model, keras.optimizers.SGD(0.01), "mse", verify=False)
    kept = _taken("current") - before
    generator = np.random.default_rng(0)
    x = tf.constant(generator.integers(0, 9, (rows, *model.input_shape[1:])).astype("float32"))
    batch = x, tf.ones([rows, *model.output_shape[1:]])
    (device,) = tmg.plan_memory(step, batch).devices
    for _ in range(3):
        float(step(batch)["loss"])
    before, peaks = _taken("current"), []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("CPU:0")
        float(step(batch)["loss"])
        peaks.append(_taken("peak") - before)
    return device.kept, kept, device.at_least - device.kept, min(peaks)


def _taken(what: str) -> int:
    if what == "current":
        for _ in range(3):
            gc.collect()
    return int(tf.config.experimental.get_memory_info("CPU:0")[what])


def main() -> None:
    """Prints a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    # One operation at a time, so that a step has the same peak each time.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.raw_ops.Empty(shape=[ALL], dtype=tf.float32)
    between = [tf.random.uniform([2048]) for _ in range(2000)][::2]  # Small tensors fit between.
    print(f"{'':12}{'kept MiB':>10}{'measured':>10}{'bound MiB':>11}{'peak':>8}{'share':>7}")
    for name in parser.parse_args().names:
        kept, given, bound, peak = measure(name)
        sizes = f"{kept / MIB:>10.2f}{given / MIB:>10.2f}{bound / MIB:>11.2f}{peak / MIB:>8.2f}"
        print(f"{name:12}{sizes}{bound / peak:>7.2f}", flush=True)
    del between


if __name__ == "__main__":
    sys.exit(main())
