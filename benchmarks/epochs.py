"""Measures what calls, epochs and validations cost: ``python benchmarks/epochs.py``.

Prints, for two replicas of one process and for two workers on this machine, in milliseconds:
twenty steps of ``step.run``; an epoch of twenty steps in ``fit``, and what it costs beyond these
steps; the same with a validation of four batches; and a second call of ``fit`` for one such epoch.
Tracing is left out. A median of rounds in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

STEPS, ROWS = 20, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    from tfmultigpu.addons.testing import run_workers

    print("| two | run(20) | epoch | beyond the steps | with validation | second fit |")
    print("|---|---|---|---|---|---|")
    for name, workers in (("replicas", 1), ("workers", 2)):
        args = ["--measure", str(asked.rounds)]
        runs = run_workers(__file__, workers, args=args, timeout=1800)
        lines = [
            line for run in runs for line in run.output.splitlines() if line[:9] == "MEASURED "
        ]
        one = json.loads(lines[0][9:])
        beyond = one["epoch"] - one["steps"]
        numbers = [one["steps"], one["epoch"], beyond, one["validation"], one["fit"]]
        print(f"| {name} | " + " | ".join(f"{1e3 * number:.1f}" for number in numbers) + " |")


def measure(rounds: int) -> dict[str, float]:
    """Returns median seconds on this worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg

    if "TF_CONFIG" not in os.environ:
        tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy()
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * ROWS, 32)).astype("float32")
    y = random.integers(0, 10, len(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        layers = [keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        model.compile("adam", loss, metrics=["accuracy"])
        other = keras.models.clone_model(model)
        optimizer = keras.optimizers.Adam()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    step = tmg.make_train_step(other, optimizer, loss, strategy, metrics=[accuracy], verify=False)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS).repeat()
    iterator = iter(tmg.distribute_dataset(dataset, strategy))
    options = {"batch_size": ROWS, "verbose": 0, "verify": False}

    def steps() -> list[float]:
        began = time.perf_counter()
        float(step.run(iterator, STEPS)["loss"])
        return [time.perf_counter() - began]

    def epochs(**more: Any) -> list[float]:
        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
        )
        tmg.fit(model, (x, y), epochs=5, callbacks=[note], **options, **more)
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def call() -> list[float]:
        began = time.perf_counter()
        tmg.fit(model, (x, y), **options)
        return [time.perf_counter() - began]

    valid = x[: 4 * ROWS], y[: 4 * ROWS]
    turns = {
        "steps": steps,
        "epoch": epochs,
        "validation": lambda: epochs(validation_data=valid),
        "fit": call,
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            found = turn()
            if number:
                times[name] += found
    return {name: statistics.median(one) for name, one in times.items()}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if sys.argv[1:2] == ["--measure"]:
        print("MEASURED", json.dumps(measure(int(sys.argv[2]))))
    else:
        main()
