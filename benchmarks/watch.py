"""The cost of ``tmg.watch`` for a small step: what a step takes with it, divided by without.

``python benchmarks/watch.py`` runs rounds of steps, watched and not watched in turn, in one process
and on the same step, and prints the medians of the rounds. CPU seconds are compared as well,
because programs beside it slow the clock more than the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmultigpu as tmg


def main() -> None:
    """Prints a line for each number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--steps", type=int, default=25)
    asked = parser.parse_args()
    tmg.split_device("CPU:0", parts=2)
    for replicas in (1, 2):
        print(json.dumps(measure(replicas, asked.rounds, asked.steps)), flush=True)


def measure(replicas: int, rounds: int, steps: int) -> dict[str, float]:
    """Returns milliseconds of a step, and the ratios of watched to not watched."""
    strategy = tmg.create_strategy(devices=replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    rows = np.ones((16 * steps, 8), "float32"), np.ones((16 * steps, 1), "float32")
    data = tmg.distribute_dataset(rows, strategy, batch_size=16)

    def one_round() -> tuple[float, float]:
        began = time.perf_counter(), time.process_time()
        for batch in data:
            step(batch)
        return time.perf_counter() - began[0], time.process_time() - began[1]

    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    one_round()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * rounds):
            # Watched, not, not, watched: what drifts is in both.
            watched = number % 4 in (0, 3)
            with tmg.watch(300, folder) if watched else contextlib.nullcontext():
                seconds[watched].append(one_round())
    medians = {}
    for name, column in (("clock", 0), ("processor", 1)):
        watched = [pair[column] for pair in seconds[True]]
        plain = [pair[column] for pair in seconds[False]]
        pairs = [a / b for a, b in zip(watched, plain, strict=True)]
        medians[f"{name} ms of a step"] = round(1000 * statistics.median(plain) / steps, 4)
        medians[f"{name}, median of ratios"] = round(statistics.median(pairs), 4)
        medians[f"{name}, ratio of fastest"] = round(min(watched) / min(plain), 4)
    return {"replicas": replicas, **medians}


if __name__ == "__main__":
    main()
