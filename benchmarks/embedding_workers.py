"""Bytes and time of a train step of several workers, whose model is a table of embeddings.

``python benchmarks/embedding_workers.py`` starts two processes for each size of the table, and
counts what passes the loopback device meanwhile; run nothing else beside it that uses it. A table
of fewer than 65,536 numbers is dense: ``--workers 4 --sizes 2000`` shows what a ring sends of it,
and with ``--logical-replicas 4`` what workers send who add in pairs, in the order of one device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROWS, IDS_OF_ROW, WIDTH = 64, 4, 32  # 256 ids a step.
SIZES = (20_000, 2_000_000)
STEPS = 20


def measure(optimizer: str, size: int, logical_replicas: int | None) -> None:
    """Trains as one of the workers; the first prints the table's line."""
    import keras

    import tfmultigpu as tmg

    strategy = tmg.create_strategy("multi_worker", fallback=False)
    layers = keras.layers
    with strategy.scope():
        ids = keras.Input((IDS_OF_ROW,), dtype="int32")
        rows = layers.Flatten()(layers.Embedding(size, WIDTH, "zeros")(ids))
        model = keras.Model(ids, layers.Dense(1)(rows))
        made = getattr(keras.optimizers, optimizer)(0.01)
    step = tmg.make_train_step(
        model, made, "mse", strategy, verify=False, logical_replicas=logical_replicas
    )
    random = np.random.default_rng(0)
    x = random.integers(0, size, ((STEPS + 2) * ROWS, IDS_OF_ROW)).astype("int32")
    y = random.normal(size=(len(x), 1)).astype("float32")
    times, sent = [], 0
    for number, batch in enumerate(tmg.distribute_dataset((x, y), strategy, batch_size=ROWS)):
        if number == 2:
            sent = _passed()
        began = time.perf_counter()
        float(step(batch)["loss"])
        times.append(time.perf_counter() - began)
    sent = _passed() - sent
    if strategy.cluster_resolver.task_id == 0:
        milliseconds = 1000 * statistics.median(times[2:])
        print(
            f"{optimizer:8} {size:>9,} x {WIDTH} {milliseconds:8.2f} ms a step, "
            f"{sent / STEPS / 1024:10.1f} KiB a step",
            flush=True,
        )


def _passed() -> int:
    """Returns the bytes that have passed the loopback device."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (own,) = (line.split()[1] for line in lines if line.strip().startswith("lo:"))
    return int(own)


def main() -> None:
    """Prints a line for each optimizer and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=["SGD", "Adagrad", "Adam"])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logical-replicas", type=int)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        measure(asked.case[0], int(asked.case[1]), asked.logical_replicas)
        return
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for optimizer in asked.only:
        for size in asked.sizes:
            script = [__file__, "--case", optimizer, str(size)]
            if asked.logical_replicas is not None:
                script += ["--logical-replicas", str(asked.logical_replicas)]
            launch = [sys.executable, "-m", "tfmultigpu", "launch", "--workers"]
            launch += [str(asked.workers), *script]
            subprocess.run(launch, env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
