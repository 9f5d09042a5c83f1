"""Bytes and time of a train step of several workers, whose model is a table of embeddings.

``python benchmarks/embedding_workers.py`` starts two processes for each size of the table, and
counts what passes the loopback device meanwhile; run nothing else beside it that uses it. Each line
is JSON. A table of fewer than 65,536 numbers is dense: ``--workers 4 --sizes 2000`` shows what a
ring sends of it, and with ``--logical-replicas 4`` what workers send who add in pairs, in the order
of one device. ``--by-hand`` trains by a loop without this library.
"""

from __future__ import annotations

import argparse
import json
import os
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
STEPS = 20


def measure(optimizer: str, size: int, logical_replicas: int | None, *, by_hand: bool) -> None:
    """Trains as one of the workers; the first prints the table's line."""
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg

    strategy = tmg.create_strategy("multi_worker", fallback=False)
    layers = keras.layers
    with strategy.scope():
        ids = keras.Input((IDS_OF_ROW,), dtype="int32")
        rows = layers.Flatten()(layers.Embedding(size, WIDTH, "zeros")(ids))
        model = keras.Model(ids, layers.Dense(1)(rows))
        made = getattr(keras.optimizers, optimizer)(0.01)
        if by_hand:
            made.build(model.trainable_variables)
    random = np.random.default_rng(0)
    x = random.integers(0, size, ((STEPS + 2) * ROWS, IDS_OF_ROW)).astype("int32")
    y = random.normal(size=(len(x), 1)).astype("float32")
    step: Callable[[Any], Any]
    if by_hand:
        step = _by_hand(model, made, strategy)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
        data = strategy.experimental_distribute_dataset(dataset)
    else:
        ours = tmg.make_train_step(
            model, made, "mse", strategy, verify=False, logical_replicas=logical_replicas
        )
        step = lambda batch: ours(batch)["loss"]  # noqa: E731
        data = tmg.distribute_dataset((x, y), strategy, batch_size=ROWS)
    times, sent = [], 0
    for number, batch in enumerate(data):
        if number == 2:
            sent = _passed()
        began = time.perf_counter()
        float(step(batch))
        times.append(time.perf_counter() - began)
    sent = _passed() - sent
    if strategy.cluster_resolver.task_id == 0:
        line = {
            "optimizer": optimizer,
            "rows": size,
            "workers": strategy.num_replicas_in_sync,
            "who": "by hand" if by_hand else "tmg",
            "logical_replicas": logical_replicas,
            "ms": round(1000 * statistics.median(times[2:]), 2),
            "kib": round(sent / STEPS / 1024, 1),
        }
        print(json.dumps(line), flush=True)


def _by_hand(model: Any, optimizer: Any, strategy: Any) -> Callable[[Any], Any]:
    import tensorflow as tf

    def replica(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / ROWS
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None)

    return step


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
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        optimizer, size = asked.case
        measure(optimizer, int(size), asked.logical_replicas, by_hand=asked.by_hand)
        return
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    for optimizer in asked.only:
        for size in asked.sizes:
            script = [__file__, "--case", optimizer, str(size)]
            if asked.logical_replicas is not None:
                script += ["--logical-replicas", str(asked.logical_replicas)]
            if asked.by_hand:
                script.append("--by-hand")
            launch = [sys.executable, "-m", "tfmultigpu", "launch", "--workers"]
            launch += [str(asked.workers), *script]
            subprocess.run(launch, env=environment, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
