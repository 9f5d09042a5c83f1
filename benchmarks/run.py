"""Compares steps and ``fit`` of this library with the best loop by hand and with Keras.

``python benchmarks/run.py`` prints a table and writes ``build/speed.json``, a line for each case;
``--first`` times the first step of a new model in ``fit`` instead. Every number of replicas has a
process of its own. In it all contenders train the same model, take turns, and are compared within
a round, so that a slow minute of the machine slows all of them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

BATCH, TEN = 64, 10
RATIOS = [("step", "step by hand"), ("ten steps", "ten steps by hand"), ("tmg.fit", "Keras fit")]
RECORD = Path(__file__).parents[1] / "build" / "speed.json"
SHAPES = {"small MLP": (32,), "CNN": (16, 16, 3), "wide MLP": (256,)}


def main() -> int:
    """Returns 0, or 1 if contenders trained different models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50, help="of a turn, a multiple of ten")
    parser.add_argument("--first", action="store_true", help="the first step of fit, N = 1")
    asked = parser.parse_args()
    if asked.first:
        print(json.dumps(_in_child(measure_first_steps, asked.rounds), indent=1))
        return 0
    RECORD.parent.mkdir(exist_ok=True)
    wrong = False
    with RECORD.open("w") as file:
        for name, replicas in itertools.product(asked.only, asked.replicas):
            case = _in_child(measure, name, replicas, asked.rounds, asked.steps)
            file.write(json.dumps(case) + "\n")
            print(f"{name}, N = {replicas}: {case['ratios']}, losses {case['loss_off']:.0e} apart")
            wrong |= not case["loss_off"] < 1e-4
    return int(wrong)


def _in_child(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(name: str, replicas: int, rounds: int, steps: int) -> dict[str, Any]:
    """Times all contenders; call it in a new process.

    Returns:
        ``"ratios"``: median and quartiles of the share of the other's time;
        ``"milliseconds"``: the median of each; ``"loss_off"``: the largest difference of a loss
        after the first steps.
    """
    import tfmultigpu as tmg

    if replicas > 1:
        tmg.split_device("CPU:0", parts=replicas)
    trained = {who: make() for who, make in contenders(name, replicas).items()}
    losses = {who: train(2 * TEN)[1] for who, (_, train) in trained.items()}
    times: dict[str, list[float]] = {who: [] for who in trained}
    for _ in range(rounds):
        for who, (_, train) in trained.items():
            gc.collect()
            times[who].append(train(steps)[0])
    ratios = {}
    for ours, theirs in RATIOS:
        shares = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
        low, median, high = statistics.quantiles(shares, n=4, method="inclusive")
        ratios[f"{ours} / {theirs}"] = [round(low, 2), round(median, 2), round(high, 2)]
    return {
        "workload": name,
        "replicas": replicas,
        "ratios": ratios,
        "milliseconds": {who: round(1e3 * statistics.median(t), 2) for who, t in times.items()},
        "loss_off": max(losses.values()) - min(losses.values()),
        "load": os.getloadavg()[0],
    }


Train = Callable[[int], tuple[float, float]]


def contenders(name: str, replicas: int) -> dict[str, Callable[[], tuple[Any, Train]]]:
    """Returns what makes each contender: its model, and what trains it for so many steps.

    That returns the seconds of a step, and the loss of the model on the first batch.
    """
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg

    strategy = tmg.create_strategy(devices=replicas)
    plain: Any = tf.distribute.get_strategy()
    if replicas > 1:
        plain = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32 * BATCH, *SHAPES[name]), dtype="float32")
    y = rng.integers(0, 10, len(x), dtype="int32")

    def data(count: int | None = None) -> Any:
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
        return (batches.repeat() if count is None else batches.repeat().take(count)).prefetch(4)

    def new(scope: Any) -> tuple[Any, Any, Any]:
        keras.utils.set_random_seed(0)
        with scope.scope():
            model, optimizer = build(name), keras.optimizers.Adam(1e-3)
            optimizer.build(model.trainable_variables)
        return model, optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def timed(model: Any, run: Callable[[int], Any]) -> tuple[Any, Train]:
        def train(steps: int) -> tuple[float, float]:
            began = time.perf_counter()
            seconds = run(steps)
            seconds = (time.perf_counter() - began) / steps if seconds is None else seconds
            logits = model(x[:BATCH], training=False)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y[:BATCH], logits)
            return seconds, float(tf.reduce_mean(losses))

        return model, train

    def by_hand(many: int) -> tuple[Any, Train]:
        model, optimizer, _ = new(plain)

        def replica(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(batch[0], training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)
                loss = tf.reduce_sum(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            local = tf.stack([loss, tf.cast(tf.size(losses), tf.float32)])
            loss, rows = tf.unstack(tf.distribute.get_replica_context().all_reduce("SUM", local))
            optimizer.apply([gradient / rows for gradient in gradients])
            return loss / rows

        @tf.function
        def steps_of(iterator: Any) -> Any:
            loss = tf.zeros([])
            for _ in tf.range(many):
                result = plain.run(replica, args=(next(iterator),))
                loss = plain.experimental_local_results(result)[0]
            return loss

        iterator = iter(plain.experimental_distribute_dataset(data()))

        def run(steps: int) -> None:
            for _ in range(steps // many):
                loss = steps_of(iterator)
            float(loss)

        return timed(model, run)

    def ours(many: int) -> tuple[Any, Train]:
        model, optimizer, loss = new(strategy)
        step = tmg.make_train_step(model, optimizer, loss, strategy, verify=False)
        iterator = iter(tmg.distribute_dataset(data(), strategy))

        def run(steps: int) -> None:
            for _ in range(steps // many):
                logs = step(next(iterator)) if many == 1 else step.run(iterator, many)
            float(logs["loss"])

        return timed(model, run)

    def fit(scope: Any, call: Callable[..., Any]) -> tuple[Any, Train]:
        model, optimizer, loss = new(scope)
        model.compile(optimizer, loss, metrics=["accuracy"])
        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
        )
        started: list[int] = []

        def run(steps: int) -> float:
            # The first call is one epoch on the batches of the others; later the second is timed.
            epochs = 2 if started else 1
            started.append(steps)
            ends.clear()
            call(model, data(steps), epochs=epochs, callbacks=[note], verbose=0)
            return (ends[-1] - ends[0]) / steps

        return timed(model, run)

    def keras_fit(model: Any, *arguments: Any, **options: Any) -> Any:
        return model.fit(*arguments, shuffle=False, **options)

    return {
        "step by hand": lambda: by_hand(1),
        "step": lambda: ours(1),
        "ten steps by hand": lambda: by_hand(TEN),
        "ten steps": lambda: ours(TEN),
        "tmg.fit": lambda: fit(strategy, tmg.fit),
        "Keras fit": lambda: fit(plain, keras_fit),
    }


def build(name: str) -> Any:
    """Returns a model, in ``SHAPES`` or ``"deep MLP"``."""
    import keras
    from keras import layers

    x = inputs = keras.Input(SHAPES.get(name, (64,)))
    for channels in (16, 32) if name == "CNN" else ():
        x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    for width in {"small MLP": (64, 64), "wide MLP": (1024, 1024)}.get(name, ()):
        x = layers.Dense(width, activation="relu")(x)
    for _ in range(10 if name == "deep MLP" else 0):
        x = layers.Add()([x, layers.Dense(64)(layers.LayerNormalization()(x))])
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def measure_first_steps(rounds: int) -> dict[str, Any]:
    """Returns processor seconds of one step of ``fit`` of new models: ours, Keras', the ratio."""
    import keras

    import tfmultigpu as tmg

    x, y = np.zeros((BATCH, 64), "float32"), np.zeros((BATCH, 10), "float32")
    calls: dict[str, Callable[[Any], Any]] = {
        "tmg.fit": lambda model: tmg.fit(model, x, y, batch_size=BATCH, verify=False, verbose=0),
        "Keras fit": lambda model: model.fit(x, y, batch_size=BATCH, verbose=0),
    }
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds + 1):
        for who, call in calls.items():
            model = build("deep MLP")
            model.compile(keras.optimizers.Adam(), "mse")
            began = time.process_time()
            call(model)
            times[who].append(time.process_time() - began)
    medians = {who: round(statistics.median(taken[1:]), 2) for who, taken in times.items()}
    return {**medians, "ratio": round(medians["tmg.fit"] / medians["Keras fit"], 2)}


if __name__ == "__main__":
    sys.exit(main())
