"""Host memory of long runs: what an epoch, an evaluation or a new model leaves behind.

``python benchmarks/long_runs.py`` prints a line of JSON for each program and contender, each in a
process of its own: the resident memory in MiB at ten moments, and what 1,000 epochs (or models) add
to it, from the last half, by least squares. A run that keeps nothing is flat, to a few tenths.

- ``fit``: one call with 2,000 epochs, with a validation.
- ``loop``: 2,000 epochs of a loop of the user's own; Keras has ``train_on_batch``.
- ``evaluate``: ``evaluate`` in a callback, after each epoch.
- ``models``: a new model, compiled and trained, 100 times, let go each time.
- ``workers``: ``fit`` on two workers; Keras' does not run there.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH, ROWS, MOMENTS = 16, 40, 10
PROGRAMS = ("fit", "loop", "evaluate", "models", "workers")
CONTENDERS = ("Keras", "tmg")
PAGE = os.sysconf("SC_PAGE_SIZE")
CHIEF = '{"task": {"index": 0}}'  # As TF_CONFIG of a process without others.


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        program, who = asked.case
        found = measure(program, who, asked.replicas if who == "tmg" else 1, asked.epochs)
        if json.loads(os.environ.get("TF_CONFIG", CHIEF))["task"]["index"] == 0:
            print(json.dumps(found), flush=True)
        return
    options = ["--replicas", str(asked.replicas), "--epochs", str(asked.epochs)]
    for program, who in itertools.product(asked.only, CONTENDERS):
        command = [sys.executable]
        if program == "workers":
            if who == "Keras":
                continue
            command += ["-m", "tfmultigpu", "launch", "--workers", "2"]
            options = ["--replicas", "0", *options[2:]]
        command += [__file__, "--case", program, who, *options]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:  # Keras' fit may crash where it lets go of an iterator.
            line = {"program": program, "who": who, "code": done.returncode}
            print(json.dumps(line), flush=True)
        for printed in done.stdout.splitlines():
            if "{" in printed:  # The launcher puts the number of the worker before it.
                print(printed[printed.index("{") :], flush=True)


def measure(program: str, who: str, replicas: int, epochs: int) -> dict[str, Any]:
    """Returns the memory at ten moments, and what 1,000 epochs add; call it in a new process."""
    import tensorflow as tf

    import tfmultigpu as tmg

    if replicas > 1:
        tmg.split_device("CPU:0", parts=replicas)
    strategy: Any = tf.distribute.get_strategy()  # In one that has a device, Keras' fit may crash.
    if who == "tmg":
        strategy = tmg.create_strategy(devices=replicas or None)
    times = epochs // 20 if program == "models" else epochs
    held: list[float] = []

    def note(epoch: int) -> None:
        if (epoch + 1) % (times // MOMENTS) == 0:
            gc.collect()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20)

    _run(program, who, strategy, times, note)
    late = held[MOMENTS // 2 :]
    slope = np.polyfit(np.arange(len(late)) * times / MOMENTS, late, 1)[0]
    return {
        "program": program,
        "who": who,
        "replicas": strategy.num_replicas_in_sync,
        "times": times,
        "mib": [round(number, 1) for number in held],
        "mib_of_1000": round(1000 * float(slope), 2),
    }


def _run(program: str, who: str, strategy: Any, times: int, note: Callable[[int], None]) -> None:
    import keras

    import tfmultigpu as tmg

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    fit = keras.Model.fit if who == "Keras" else tmg.fit
    evaluate = keras.Model.evaluate if who == "Keras" else tmg.evaluate

    def new() -> Any:
        with strategy.scope():
            layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.1, seed=1)]
            model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
        return model

    model = new()

    def at_end(epoch: int, logs: Any) -> None:
        if program == "evaluate":
            evaluate(model, x, y, batch_size=BATCH, verbose=0)
        note(epoch)

    if program == "models":
        for number in range(times):
            fit(new(), x, y, batch_size=BATCH, epochs=1, verbose=0)
            note(number)
    elif program == "loop":
        loop = _loop_of_keras if who == "Keras" else _loop_of_ours
        train = loop(model, strategy, x, y)
        for epoch in range(times):
            train()
            note(epoch)
    else:
        callback = keras.callbacks.LambdaCallback(on_epoch_end=at_end)
        options: dict[str, Any] = {"validation_data": (x, y)} if program == "fit" else {}
        options |= {"epochs": times, "callbacks": [callback], "verbose": 0}
        fit(model, x, y, batch_size=BATCH, **options)


def _loop_of_keras(model: Any, strategy: Any, x: Any, y: Any) -> Callable[[], None]:
    def train() -> None:
        for begin in range(0, ROWS, BATCH):
            model.train_on_batch(x[begin : begin + BATCH], y[begin : begin + BATCH])

    return train


def _loop_of_ours(model: Any, strategy: Any, x: Any, y: Any) -> Callable[[], None]:
    import tfmultigpu as tmg

    step = tmg.make_train_step(model, model.optimizer, "mse", strategy)
    data = tmg.distribute_dataset((x, y), strategy, batch_size=BATCH)

    def train() -> None:
        for batch in data:
            float(step(batch)["loss"])

    return train


if __name__ == "__main__":
    main()
