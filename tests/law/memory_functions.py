"""Bytes by a plan and by TensorFlow's allocator, measured in a process of their own."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import keras
import tensorflow as tf
from keras import layers

import tfmultigpu as tmg

_ALL = 2**28  # Numbers that are allocated once: then what is free is one piece, with one end.


def given(what: str = "current") -> int:
    """Returns the bytes that the allocator of all virtual CPUs has given out, or its peak."""
    if what == "current":
        for _ in range(3):
            gc.collect()
    return int(tf.config.experimental.get_memory_info("CPU:0")[what])


def prepare(devices: int) -> list[tf.Tensor]:
    """Makes virtual CPUs, and tensors between which small ones fit; keep them alive.

    Otherwise small ones would break what is free to pieces, of which one is given out whole as soon
    as more than half of it is asked for.
    """
    tmg.split_device("CPU:0", parts=devices)
    tf.config.threading.set_inter_op_parallelism_threads(1)  # What is free has the same order.
    tf.raw_ops.Empty(shape=[_ALL], dtype=tf.float32)
    return [tf.random.uniform([4096]) for _ in range(2000)][::2]


def part_copies() -> None:
    """Gives each variable memory of its own: virtual CPUs share what is equal, as GPUs cannot."""
    for each in gc.get_objects():
        if type(each).__name__ == "ResourceVariable" and hasattr(each.handle, "numpy"):
            with tf.device(each.device):
                each.assign(tf.raw_ops.DeepCopy(x=each.read_value()))


def kept_bytes(replicas: int, *, sharded: bool, shard_update: bool) -> tuple[int, int]:
    """Returns what is kept between steps, by the plan and given out."""
    strategy = tmg.create_strategy(devices=replicas)
    batch = tf.ones([6, 1024]), tf.ones([6, 1024])
    before = given()
    shards: Any = tmg.sharded_variables() if sharded else contextlib.nullcontext()
    with strategy.scope(), shards:
        inner = [layers.Dense(1024) for _ in range(5)]
        model = keras.Sequential([keras.Input((1024,)), *inner])
        optimizer = keras.optimizers.Adam()
    options: Any = {} if sharded else {"shard_update": shard_update}
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False, **options)
    plan = tmg.plan_memory(step, batch)
    float(step(batch)["loss"])
    if sharded or shard_update:
        part_copies()
    return sum(device.kept for device in plan.devices), given() - before


def bound_and_peak() -> tuple[int, int]:
    """Returns what a step needs at least by the plan, and the peak of a step."""
    convolutions = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPool2D()]
    model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, layers.Flatten()])
    model.add(layers.Dense(512, "gelu"))
    model.add(layers.Dense(10))
    step = tmg.make_train_step(model, keras.optimizers.SGD(0.01), "mse", verify=False)
    batch = tf.ones([32, 32, 32, 3]), tf.ones([32, 10])
    (device,) = tmg.plan_memory(step, batch).devices
    for _ in range(2):
        float(step(batch)["loss"])
    before = given()
    tf.config.experimental.reset_memory_stats("CPU:0")
    float(step(batch)["loss"])
    return device.at_least - device.kept, given("peak") - before


def measure_memory() -> dict[str, tuple[int, int]]:
    """Returns all of these, by what they are."""
    between = prepare(3)
    pairs = {
        "copies": kept_bytes(3, sharded=False, shard_update=False),
        "owners": kept_bytes(2, sharded=False, shard_update=True),
        "sharded": kept_bytes(2, sharded=True, shard_update=True),
        "bound": bound_and_peak(),
    }
    del between
    return pairs


def probed_and_measured() -> dict[str, tuple[int, int]]:
    """Returns the peak of a step by a probe with 1/8 of its rows, and measured."""
    between = prepare(1)
    peaks = {}
    for name, inner in (
        ("dense", [layers.Dense(512, "gelu") for _ in range(4)]),
        ("convolutions", [layers.Reshape((16, 16, 2)), layers.Conv2D(32, 3, activation="relu"),
                          layers.BatchNormalization(), layers.Conv2D(32, 3), layers.Flatten()]),
    ):  # fmt: skip
        model = keras.Sequential([keras.Input((512,)), *inner, layers.Dense(8)])
        step = tmg.make_train_step(model, keras.optimizers.Adam(), "mse", verify=False)
        batch = tf.random.normal([512, 512]), tf.ones([512, 8])
        weights = model.get_weights()
        plan = tmg.plan_memory(step, batch, probe=True)
        same = [(a == b).all() for a, b in zip(weights, model.get_weights(), strict=True)]
        assert all(same)
        assert int(step.optimizer.iterations) == 0
        assert plan.peak is not None
        step(batch)
        tf.config.experimental.reset_memory_stats("CPU:0")
        for _ in range(3):
            float(step(batch)["loss"])
        peaks[name] = plan.peak.of(plan.rows_at_once), given("peak")
        print(name, peaks[name], plan.peak)
    del between
    return peaks
