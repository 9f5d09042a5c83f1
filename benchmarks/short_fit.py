"""Costs of ``fit`` beside its steps: its first epoch, and a later call that trains one step.

``python benchmarks/short_fit.py`` prints a line for each contender, each in a process of its own:
``fit`` of this library and of Keras, on the same replicas, of a network of ten blocks with batch
normalization. CPU seconds are compared, because programs beside it slow the clock more than the
processor. The fixed cost is that of a call with one step, less a step of a call with many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from multiprocessing import get_context
from typing import Any

import numpy as np

BATCH, STEPS, CALLS = 32, 8, 15
CONTENDERS = ("Keras", "tmg")


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--synchronized", action="store_true", help="the batch normalization")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    asked = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for _ in range(asked.rounds):
        for who in asked.only:
            with get_context("spawn").Pool(1) as pool:
                line = pool.apply(measure, (who, asked.replicas, asked.synchronized))
            print(json.dumps(line), flush=True)


def measure(who: str, replicas: int, synchronized: bool) -> dict[str, Any]:
    """Returns seconds and CPU seconds of the first epoch, and milliseconds of later calls."""
    import tensorflow as tf

    import tfmultigpu as tmg

    if replicas > 1:
        tmg.split_device("CPU:0", parts=replicas)
    strategy = tmg.create_strategy(devices=replicas)
    if who == "Keras" and replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        model = build(synchronized)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 16, 16, 3)).astype("float32")
    y = (np.arange(len(x)) % 10).astype("int32")

    def fit(steps: int) -> tuple[float, float]:
        began, processor = time.perf_counter(), time.process_time()
        rows = x[: BATCH * steps], y[: BATCH * steps]
        if who == "Keras":
            model.fit(*rows, batch_size=BATCH, verbose=0)
        else:
            tmg.fit(model, rows, batch_size=BATCH, verbose=0)
        return time.perf_counter() - began, time.process_time() - processor

    seconds, processor = fit(STEPS)
    fit(1)
    short, long = [], []
    for _ in range(CALLS):
        short.append(fit(1)[0])
        long.append(fit(STEPS)[0])
    step = (statistics.median(long) - statistics.median(short)) / (STEPS - 1)
    return {
        "who": who,
        "first_epoch_s": round(seconds, 1),
        "first_epoch_cpu_s": round(processor, 1),
        "one_step_ms": round(1e3 * statistics.median(short), 1),
        "fixed_ms": round(1e3 * (statistics.median(short) - step), 1),
        "step_ms": round(1e3 * step, 1),
    }


def build(synchronized: bool) -> Any:
    """Returns a compiled network of ten blocks."""
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16, 16, 3))
    for _ in range(10):
        x = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization(synchronized=synchronized)(x))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


if __name__ == "__main__":
    main()
