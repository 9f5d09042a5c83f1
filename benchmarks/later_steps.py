"""Later steps of a new model, with and without everything that may have run before them.

``python benchmarks/later_steps.py`` prints, for each model and number of replicas, the time of a
later step as a share of the time without anything before it: what a check, an evaluation, a
checkpoint or a measurement leaves behind in variables, allocator and threads shows as more than 1.
``--against PATH`` has the other of each pair run from another checkout, such as
``git worktree add /tmp/before 0723ad4``; then each case is compared with the same case there.

Each measurement has a process of its own, and those of a pair take turns, so that a slow minute of
the machine slows both. Use an idle machine; the numbers are medians of the ratios of the pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
BATCH = 64
SHAPES = {"wide MLP": (256,), "CNN": (16, 16, 3)}
BEFORE = ("nothing", "verify", "evaluate", "checkpoint", "explain", "capacities", "profile", "all")


def main() -> int:
    """Prints a line for each case; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--before", choices=BEFORE, nargs="+", default=["verify", "all"])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--against", type=Path, help="the root of another checkout")
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "REPLICAS", "BEFORE"))
    asked = parser.parse_args()
    if asked.measure:
        name, replicas, before = asked.measure
        print(json.dumps(measure(name, int(replicas), before, asked.steps)))
        return 0
    for name, replicas, before in itertools.product(asked.only, asked.replicas, asked.before):
        ratios = []
        for _ in range(asked.pairs):
            ours = _in_process(SOURCE, name, replicas, before, asked.steps)
            if asked.against is None:
                other = _in_process(SOURCE, name, replicas, "nothing", asked.steps)
            else:
                other = _in_process(asked.against / "src", name, replicas, before, asked.steps)
            ratios.append(ours / other)
        shown = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(
            f"{name}, N = {replicas}, after {before}: {statistics.median(ratios):.3f} ({shown}), "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    return 0


def _in_process(source: Path, name: str, replicas: int, before: str, steps: int) -> float:
    """Returns the median seconds of a later step, measured in a new process with some source."""
    environment = {**os.environ, "PYTHONPATH": str(source), "TF_CPP_MIN_LOG_LEVEL": "3"}
    call = [sys.executable, __file__, "--steps", str(steps), "--measure"]
    printed = subprocess.run(
        [*call, name, str(replicas), before],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return float(json.loads(printed.splitlines()[-1]))


def measure(name: str, replicas: int, before: str, steps: int) -> float:
    """Returns the median seconds of a step after what ran before; call it in a new process."""
    import keras
    import numpy as np

    import tfmultigpu as tmg

    tmg.split_device("CPU:0", parts=replicas)
    strategy = tmg.create_strategy(devices=replicas)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, *SHAPES[name]), dtype="float32")
    y = rng.integers(0, 10, BATCH, dtype="int32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu")]
        if name == "CNN":
            convolutions = [keras.layers.Conv2D(32, 3, activation="relu") for _ in range(2)]
            layers = [*convolutions, keras.layers.Flatten(), keras.layers.Dense(128, "relu")]
        model = keras.Sequential([keras.Input(SHAPES[name]), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    optimizer = model.optimizer
    verify = "first" if before in ("verify", "all") else False
    step = tmg.make_train_step(model, optimizer, loss, strategy, verify=verify)
    data = tmg.distribute_dataset((x, y), strategy, batch_size=BATCH)
    batch = next(iter(data))
    step(batch)

    def checkpoint() -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = tmg.Checkpoints(folder, model, optimizer)
            checkpoints.save()
            checkpoints.restore()

    def capacities() -> None:
        with contextlib.suppress(tmg.TfMultiGpuError):  # Of a machine too busy to measure.
            tmg.tuning.measured_capacities(step, (x, y), repeats=1)

    ran: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: tmg.evaluate(model, (x, y), batch_size=BATCH, verbose=0, verify=verify),
        "checkpoint": checkpoint,
        "explain": lambda: tmg.explain(model, optimizer, strategy=strategy),
        "capacities": capacities,
        "profile": lambda: tmg.tuning.profile_step(step, data, steps=2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part, run in ran.items():
            if before in (part, "all"):
                run()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        float(step(batch)["loss"])
        times.append(time.perf_counter() - began)
    return statistics.median(times[steps // 5 :])  # The first ones are not like the others.


if __name__ == "__main__":
    sys.exit(main())
