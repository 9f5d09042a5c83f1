"""Time and peak memory of a train step whose model is a table of embeddings.

``python benchmarks/embedding.py`` takes about three minutes on two idle cores. Each contender has a
process of its own, one after the other; ratios are to Keras on one device. It prints a line of JSON
for each; with ``--threshold`` from which size on lists of rows are faster than dense gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, IDS_OF_ROW, WIDTH = 64, 4, 32  # 256 ids a step.
SIZES = (20_000, 2_000_000)
CONTENDERS = ("gather and scatter", "Keras", "by hand, N = 2", "tmg, N = 1", "tmg, N = 2")
OPTIMIZERS = ("SGD", "Adagrad", "Adam")
STEPS = 20
NEAR_THRESHOLD = (1_024, 2_048, 4_096, 16_384)  # Rows; the threshold is at 65,536 numbers.
PAGE = os.sysconf("SC_PAGE_SIZE")


def step_of(contender: str, name: str, size: int) -> tuple[Callable[[Any, Any], Any], float]:
    """Returns a function that trains on one batch, and the MiB of the variables."""
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg

    layers = keras.layers
    loss = keras.losses.MeanSquaredError()
    replicas = int(contender.rpartition("= ")[2]) if "N =" in contender else 1
    kind = "mirrored" if replicas > 1 else "one_device"
    strategy = tmg.create_strategy(prefer=kind, devices=replicas)
    with strategy.scope():
        ids = keras.Input((IDS_OF_ROW,), dtype="int32")
        rows = layers.Embedding(size, WIDTH, "zeros")(ids)  # Made without a peak.
        model = keras.Model(ids, layers.Dense(1)(layers.Flatten()(rows)))
        optimizer = getattr(keras.optimizers, name)(0.01)
        if "tmg" not in contender:
            optimizer.build(model.trainable_variables)

    step = None
    if "tmg" in contender:
        step = tmg.make_train_step(model, optimizer, loss, strategy, verify=False)
    owned = 0
    for variable in (*model.variables, *optimizer.variables):
        for copy in strategy.experimental_local_results(variable.value):
            owned += copy.shape.num_elements() * copy.dtype.size
    if step is not None:
        return lambda x, y: step((x, y))["loss"], owned / 2**20

    if contender == "gather and scatter":
        table, kernel, bias = (variable.value for variable in model.trainable_variables)

        @tf.function(autograph=False)
        def look_up(x: Any, y: Any) -> Any:
            found = tf.gather(table, x)
            with tf.GradientTape() as tape:
                tape.watch(found)
                outputs = tf.reshape(found, [-1, IDS_OF_ROW * WIDTH]) @ kernel + bias
                value = loss(y, outputs)
            of_rows, *others = tape.gradient(value, [found, kernel, bias])
            table.scatter_sub(tf.IndexedSlices(0.01 * of_rows, x))
            for variable, gradient in zip((kernel, bias), others, strict=True):
                variable.assign_sub(0.01 * gradient)
            return value

        return look_up, owned / 2**20

    def train(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / replicas
        optimizer.apply(tape.gradient(value, model.trainable_variables))
        return value

    def run(x: Any, y: Any) -> Any:
        if replicas == 1:
            return train(x, y)
        parts = [tf.split(each, replicas) for each in (x, y)]
        values = [
            strategy.experimental_distribute_values_from_function(
                lambda context, part=part: part[context.replica_id_in_sync_group]
            )
            for part in parts
        ]
        return strategy.reduce("SUM", strategy.run(train, args=tuple(values)), axis=None)

    return tf.function(run, autograph=False), owned / 2**20


def measure(contender: str, optimizer: str, size: int) -> tuple[float, float]:
    """Returns the milliseconds of a step, and the MiB of its peak beside the model."""
    import tensorflow as tf

    import tfmultigpu as tmg

    tmg.split_device("CPU:0", parts=2)
    random = np.random.default_rng(0)
    x = tf.constant(random.integers(0, size, (STEPS, ROWS, IDS_OF_ROW)), tf.int32)
    y = tf.constant(random.normal(size=(STEPS, ROWS, 1)), tf.float32)
    batches = list(zip(tf.unstack(x), tf.unstack(y), strict=True))
    before = _resident()
    step, owned = step_of(contender, optimizer, size)
    times = []
    for batch in batches:
        began = time.perf_counter()
        float(step(*batch))
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times), _peak() - before - owned


def times_near_threshold(size: int, turns: int = 150) -> dict[str, float]:
    """Returns the milliseconds of processor time of a step, by lists and by dense gradients.

    Both are timed in turns in this process, on two replicas, with Adagrad.
    """
    import tensorflow as tf

    from tfmultigpu.accumulation import table_rows

    random = np.random.default_rng(0)
    steps: dict[str, Callable[[Any, Any], Any]] = {}
    for kind, least in (("lists", 1), ("dense", 2**40)):
        table_rows.LARGE = least
        steps[kind], _ = step_of("tmg, N = 2", "Adagrad", size)
        steps[kind](np.zeros((ROWS, IDS_OF_ROW), "int32"), np.zeros((ROWS, 1), "float32"))
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(turns):
        x = tf.constant(random.integers(0, size, (ROWS, IDS_OF_ROW)), tf.int32)
        y = tf.ones((ROWS, 1))
        for kind, step in steps.items():
            began = time.process_time()
            float(step(x, y))
            times[kind].append(time.process_time() - began)
    return {kind: 1000 * statistics.median(each) for kind, each in times.items()}


def _resident() -> float:
    """Returns the memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def _peak() -> float:
    """Returns the most that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_child(contender: str, optimizer: str, size: int) -> tuple[float, float]:
    """Returns ``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--case", contender, optimizer, str(size)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    milliseconds, peak = result.stdout.split()[-2:]
    return float(milliseconds), float(peak)


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--threshold", action="store_true")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        contender, optimizer, size = asked.case
        print(*measure(contender, optimizer, int(size)))
        return
    if asked.threshold:
        import tfmultigpu as tmg

        tmg.split_device("CPU:0", parts=2)
        for size in NEAR_THRESHOLD:
            times = times_near_threshold(size)
            shown = ", ".join(f"{kind} {number:.2f} ms" for kind, number in times.items())
            print(f"{size:>9,} x {WIDTH} = {size * WIDTH:>9,} numbers: {shown}", flush=True)
        return
    for optimizer in asked.only:
        for size in asked.sizes:
            keras_time = None
            for contender in ("Keras", *(name for name in CONTENDERS if name != "Keras")):
                if contender == "gather and scatter" and optimizer != "SGD":
                    continue
                milliseconds, peak = in_child(contender, optimizer, size)
                keras_time = keras_time or milliseconds
                line = {
                    "optimizer": optimizer,
                    "rows": size,
                    "who": contender,
                    "ms": round(milliseconds, 2),
                    "of Keras": round(milliseconds / keras_time, 2),
                    "peak_mib": round(peak),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
