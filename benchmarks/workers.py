"""Measures steps of several workers: ``python benchmarks/workers.py``.

Workers are processes on this machine, connected by loopback. Prints, for 1, 2 and 4 workers and
two models, the milliseconds of a step by hand under the same strategy, and the ratios to it: of the
step of this library, of ten steps in one call, of ``fit``, and of the step with gradients added in
bfloat16. Then the parts of a step.
All contenders take turns inside each worker, so load on the machine falls on all of them.
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

MODELS = {"small": (32, 64), "1.3 M": (64, 1100)}
BATCH = 64
TEN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    from tfmultigpu.addons.testing import run_workers

    found: dict[tuple[str, int], dict[str, Any]] = {}
    print("| model | workers | by hand, ms | step | ten steps | fit | in bfloat16 |")
    print("|---|---|---|---|---|---|---|")
    for model in MODELS:
        for workers in (1, 2, 4):
            args = ["--measure", model, str(asked.rounds)]
            runs = run_workers(__file__, workers, args=args, timeout=1800)
            lines = [
                line for run in runs for line in run.output.splitlines() if line[:9] == "MEASURED "
            ]
            one = found[model, workers] = json.loads(lines[0][9:])
            hand = one["by hand"]
            ratios = [one[name] / hand for name in ("step", "ten", "fit", "bfloat16")]
            print(
                f"| {model} | {workers} | {1e3 * hand:.2f} | "
                + " | ".join(f"{ratio:.2f}" for ratio in ratios)
                + " |"
            )
    print("\n| model | workers | " + " | ".join(found["small", 1]["parts"]) + " |")
    print("|---|---|" + "---|" * 5)
    for (model, workers), one in found.items():
        parts = " | ".join(f"{1e3 * part:.2f}" for part in one["parts"].values())
        print(f"| {model} | {workers} | {parts} |")


def measure(model_name: str, rounds: int) -> dict[str, Any]:
    """Returns median seconds of a step for each contender on this worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg

    inputs, width = MODELS[model_name]
    strategy = tmg.create_strategy()
    workers = strategy.num_replicas_in_sync
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * workers * TEN, inputs)).astype("float32")
    y = random.integers(0, 10, len(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(width, "relu") for _ in range(2)]
            model = keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(10)])
            model.compile(keras.optimizers.SGD(0.01), loss)
        return model

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH * workers).repeat()

    def by_hand() -> Any:
        model = make()
        each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        # Each worker reads its own rows, as a loop by hand would.
        number = 0 if workers == 1 else strategy.cluster_resolver.task_id
        own = dataset.unbatch().shard(workers, number).batch(BATCH, drop_remainder=True)
        iterator = iter(own.prefetch(tf.data.AUTOTUNE))

        def replica(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                values = each(batch[1], model(batch[0], training=True))
                value = tf.reduce_sum(values) / (BATCH * workers)
            gradients = tape.gradient(value, model.trainable_variables)
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("SUM", gradients)
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.value.assign_sub(0.01 * gradient)
            return value

        @tf.function
        def step(batch: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None)

        return lambda: float(step(next(iterator)))

    def ours(*features: Any, ten: bool = False) -> Any:
        model = make()
        step = tmg.make_train_step(
            model, model.optimizer, loss, strategy, verify=False, features=features
        )
        iterator = iter(tmg.distribute_dataset(dataset, strategy))
        if ten:
            return lambda: float(step.run(iterator, TEN)["loss"])
        return lambda: float(step(next(iterator))["loss"])

    fitted = make()
    data = tmg.distribute_dataset(dataset, strategy)
    options = {"steps_per_epoch": TEN, "verbose": 0, "verify": False}
    turns = {
        "by hand": (by_hand(), 1, TEN),
        "step": (ours(), 1, TEN),
        "bfloat16": (ours(tmg.steps.NarrowMessages()), 1, TEN),
        "ten": (ours(ten=True), TEN, 1),
        # The epochs after the first of a call: what a long run is made of.
        "fit": (lambda: _epochs(fitted, data, options), 1, 1),
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 2):
        for name, (run, steps, repeats) in turns.items():
            for _ in range(repeats):
                began = time.perf_counter()
                taken = run()
                seconds = (time.perf_counter() - began) / steps
                if number >= 2:
                    times[name] += taken if isinstance(taken, list) else [seconds]
    model = make()
    step = tmg.make_train_step(model, model.optimizer, loss, strategy, verify=False)
    sized = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH * workers)
    profile = tmg.tuning.profile_step(step, tmg.distribute_dataset(sized, strategy), steps=50)
    found: dict[str, Any] = {name: statistics.median(one) for name, one in times.items()}
    found["parts"] = {"call": profile.call, "all-reduce": profile.all_reduce}
    return found


def _epochs(model: Any, data: Any, options: dict[str, Any]) -> list[float]:
    """Returns the seconds of a step of each epoch after the first of one call of fit."""
    import keras

    import tfmultigpu as tmg

    ends: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )
    tmg.fit(model, data, epochs=4, callbacks=[note], **options)
    return [(end - begin) / TEN for begin, end in itertools.pairwise(ends)]


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if sys.argv[1:2] == ["--measure"]:
        print("MEASURED", json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
