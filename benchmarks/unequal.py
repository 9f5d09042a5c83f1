"""Two virtual CPUs, one of them made slower by real extra work, with equal and planned shares.

``python benchmarks/unequal.py`` takes about two minutes on two idle cores: each is a device.
"""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from statistics import median
from typing import Any

import numpy as np

ROWS = 1024
WIDTH = 128
PRODUCTS = 500  # of matrices, for each row on the faster device


def measure_pair(slower: int, rounds: int) -> dict[str, Any]:
    """Times steps with equal and with planned shares, and each device by itself.

    Call it in a new process. Each device computes with one thread, so that two cores are two
    devices. All take turns, round by round.

    Args:
        slower: How many times the work of a row is done on the second device.
        rounds: How often each is timed.

    Returns:
        ``"seconds"``: of a step, by what was measured, round by round; ``"shares"`` planned from
        ``"speeds"``, the measured rows per second; ``"rows"`` of the batch; ``"slower"``.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    import tfmultigpu as tmg

    strategy = tmg.create_strategy(devices=["CPU:0", "CPU:1"])
    step = _make_step(strategy, slower)
    rng = np.random.default_rng(0)
    batch = (
        rng.normal(size=(ROWS, WIDTH)).astype("float32"),
        rng.normal(size=(ROWS, 1)).astype("float32"),
    )
    step(batch)
    speeds = tmg.tuning.measured_capacities(step, batch, repeats=3)
    shares = tmg.data.plan_shares(ROWS, speeds)
    cuts = {
        "fast_alone": (ROWS - 1, 1),
        "slow_alone": (1, ROWS - 1),
        "equal": (1, 1),
        "planned": shares,
    }
    dataset = tf.data.Dataset.from_tensors(batch)
    shards = {
        name: next(iter(tmg.distribute_dataset(dataset, strategy, shares=cut)))
        for name, cut in cuts.items()
    }
    for one in shards.values():
        float(step(one)["loss"])
    seconds: dict[str, list[float]] = {name: [] for name in cuts}
    for _ in range(rounds):
        for name, one in shards.items():
            began = time.perf_counter()
            float(step(one)["loss"])
            seconds[name].append(round(time.perf_counter() - began, 6))
    return {
        "slower": slower,
        "rows": ROWS,
        "shares": shares,
        "speeds": [round(speed, 2) for speed in speeds],
        "seconds": seconds,
    }


def _make_step(strategy: Any, slower: int) -> Any:
    import keras
    import tensorflow as tf

    import tfmultigpu as tmg

    class Work(keras.layers.Layer):
        """Products of matrices, more of them on the second replica; the values stay as they are."""

        def call(self, inputs: Any) -> Any:
            context = tf.distribute.get_replica_context()
            replica = context and tf.get_static_value(context.replica_id_in_sync_group)
            matrix = tf.random.stateless_normal([WIDTH, WIDTH], [1, 2]) / WIDTH**0.5
            worked = inputs
            for _ in range(PRODUCTS * (slower if replica == 1 else 1)):
                worked = tf.tanh(worked @ matrix)
            return inputs + 1e-30 * tf.stop_gradient(worked)

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), Work(), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1e-3)
    return tmg.make_train_step(model, optimizer, "mse", strategy)


def main() -> None:
    """Prints which share of the rows per second of both devices alone a step reaches."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    for slower in (2, 4):
        with get_context("spawn").Pool(1) as pool:  # Devices of a process cannot change.
            pair = pool.apply(measure_pair, (slower, 9))
        seconds = {name: median(times) for name, times in pair["seconds"].items()}
        ideal = (ROWS - 1) / seconds["fast_alone"] + (ROWS - 1) / seconds["slow_alone"]
        reached = {name: f"{ROWS / seconds[name] / ideal:.2f}" for name in ("equal", "planned")}
        print(f"{slower} times slower: shares {pair['shares']}, reached {reached}")


if __name__ == "__main__":
    main()
