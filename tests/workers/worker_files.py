"""Trains on files as one of several workers, and says which rows it saw and what was lost."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.strategies.process_state import process_state
from tfmultigpu.strategies.worker_exchange import WorkerExchange

ROWS, BATCH, EPOCHS = 1001, 48, 2


def write_files(folder: Path, count: int) -> list[str]:
    """The same rows in so many files of different lengths."""
    stops = np.linspace(0, ROWS, count + 1).astype(int) ** 2 // ROWS
    paths = []
    for number, (start, stop) in enumerate(itertools.pairwise(stops)):
        path = folder / f"{count}-{number}.csv"
        path.write_text("".join(f"{row}\n" for row in range(start, stop)))
        paths.append(str(path))
    return paths


def read(files: list[str], **shuffle: Any) -> tf.data.Dataset:
    numbers = tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(line, tf.int64))
    examples = numbers.map(lambda n: (n, tf.math.floormod(tf.cast(n, tf.float32) * 0.37, 1.0)))
    return examples.shuffle(200, **shuffle).batch(BATCH)


def train(strategy: Any, files: list[str]) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    seen = np.zeros(ROWS, int)
    losses = []

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        x = tf.cast(batch[0], tf.float32)[:, None] / ROWS
        return tmg.loss_sum(keras.losses.mean_squared_error, batch[1][:, None], model(x))

    step = tmg.make_train_step(model, optimizer, None, strategy, forward=forward)
    data = tmg.distribute_dataset(read(files, seed=5), strategy)
    for _ in range(EPOCHS):
        for batch in data:
            for shard in strategy.experimental_local_results(batch[0]):
                assert len(shard) > 0
                seen += np.bincount(shard.numpy(), minlength=ROWS)
            losses.append(float(step(batch)["loss"]))
    return {"seen": seen, "losses": losses}


def refused(strategy: Any, dataset: Any, batches: int = 1, **options: Any) -> str:
    try:
        data = tmg.distribute_dataset(dataset, strategy, **options)
        for _ in itertools.islice(data, batches):
            time.sleep(0.01)
    except tmg.errors.DataError as error:
        return str(error)
    return ""


def run(folder: str) -> dict[str, Any]:
    """What one worker does; all in one process, since starting it is what costs."""
    strategy = tmg.create_strategy()
    found: dict[str, Any] = {"worker": 0}
    for count in (1, 2, 5):
        found[count] = train(strategy, sorted(str(p) for p in Path(folder).glob(f"{count}-*")))
    link = process_state.cluster
    if link is not None:
        found["worker"] = link.index
        two = sorted(str(p) for p in Path(folder).glob("2-*"))
        tf.random.set_seed(os.getpid())
        found["without a seed"] = refused(strategy, read(two))
        found["other order"] = refused(strategy, read(two[:: -1 if link.index else 1], seed=1))
        batches = tf.data.Dataset.range(10).batch(2)
        found["other length"] = refused(strategy, batches.take(5 - link.index))
        tf.random.set_seed(7)
        found["seed for all"] = refused(strategy, read(two))
        found["last batch"] = refused(strategy, batches.map(lambda n: n + (n // 8) * link.index), 6)
        # Nobody knows how many batches there are: found at a power of two of them, or at the end.
        later = batches.repeat(9).map(lambda n: n + (n // 8) * link.index).filter(lambda n: True)
        found["later batch"] = refused(strategy, later, 45)
        less = batches.repeat(9).filter(lambda n: True).take(45 - link.index)
        found["one batch less"] = refused(strategy, less, 46)
        options = {"batch_size": 5, "preprocess": lambda n: n}
        found["by number"] = refused(strategy, np.arange(40) + 100 * link.index, **options)
        found["alike by number"] = refused(strategy, np.arange(40), **options)
        found["dict"] = refused(strategy, batches.map(lambda n: {"n": n, "text": ["a", "b"]}))
        # The first worker keeps the values that are compared: it stays until all have read them.
        WorkerExchange(strategy)("the end", [0])
    return found
