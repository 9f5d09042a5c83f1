"""Devices, strategies, compiling and counting traces."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from guarantee import Case, Difference
from one_device import strategy_of
from recipes import (
    Problem,
    Trained,
    by_fit,
    by_step,
    compiled,
    crossentropy,
    divided_by,
    fresh,
    mirrored,
    one_device,
    rows,
    weights,
    weights_of,
)

import tfmultigpu as tmg

Device = functools.partial(Case, section="Devices, strategies, compilation")
EVEN = Problem(rows(128))


def trained(strategy: Any, problem: Problem = EVEN) -> Difference:
    """Our step under a strategy of this library."""
    with strategy.scope():
        model, optimizer = fresh(problem)
    step = tmg.make_train_step(model, optimizer, problem.loss, strategy, **problem.options)
    for batch in tmg.distribute_dataset(problem.dataset(), strategy):
        step(batch)
    return weights(Trained(weights_of(model, strategy), []), one_device(problem))


def fitted(strategy: Any) -> Difference:
    model = compiled(EVEN, strategy)
    model.fit(EVEN.dataset(), verbose=0, shuffle=False)
    return weights(Trained(weights_of(model, strategy), []), one_device(EVEN))


def devices_of(strategy: Any) -> int:
    """Different devices that the copies of a variable are really on."""
    with strategy.scope():
        variable = tf.Variable(0.0)
    return len({copy.device for copy in strategy.experimental_local_results(variable)})


def one_missing() -> Difference:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:5"])
    return Difference(2 - devices_of(strategy), "devices unused, of 2")


def asked_for(*names: str) -> Any:
    def ours() -> Difference:
        tmg.create_strategy(devices=list(names))
        return Difference(0.0)

    return ours


def no_devices() -> Difference:
    found = tf.distribute.MirroredStrategy([]).num_replicas_in_sync
    return Difference(found, "replicas where none was asked for")


def none_asked_for() -> Difference:
    tmg.create_strategy(devices=[])
    return Difference(0.0)


def second_default_strategy() -> Difference:
    fitted(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    return fitted(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"]))


def second_strategy_of_ours() -> Difference:
    trained(tmg.create_strategy(devices=2))
    return trained(tmg.create_strategy(devices=4))


def split_late_by_tensorflow() -> Difference:
    tf.constant(1.0)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return Difference(0.0)


def split_late() -> Difference:
    tf.constant(1.0)
    tmg.split_device("CPU:0", parts=2)
    return Difference(0.0)


def data_parallel() -> Difference:
    """Devices that hold the weights and do the work, of two that were asked for."""
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"], auto_shard_dataset=False)
    )
    model, optimizer = fresh(EVEN)
    model.compile(optimizer, crossentropy())
    model.fit(EVEN.dataset(), verbose=0)
    copies = {w.value.device for w in model.weights}
    return Difference(2 - len(copies), "idle devices, of 2")


def both_devices() -> Difference:
    return Difference(2 - devices_of(tmg.create_strategy(devices=2)), "idle devices, of 2")


class CountsCalls(keras.Model):
    """Counts how often Python calls it: once for each trace and replica."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.calls = 0

    def build(self, shape: Any = None) -> None:
        self.dense.build((None, 6))
        self.built = True

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return self.dense(inputs)


PARTIAL = Problem(rows(100), build=CountsCalls)


def traces_of_a_loop() -> Difference:
    strategy = mirrored(2)
    with strategy.scope():
        model, optimizer = fresh(PARTIAL)
        model.build()
        optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = divided_by(64)(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda batch: strategy.run(train_step, args=batch))
    full, partial = PARTIAL.batches()
    data = []
    for batch in (full, partial):
        dataset = tf.data.Dataset.from_tensor_slices(batch).batch(len(batch[0]))
        data.append(next(iter(strategy.experimental_distribute_dataset(dataset))))
    run(data[0])
    before = model.calls
    run(data[1])
    return Difference((model.calls - before) / 2, "further traces")


def traces_of_a_step() -> Difference:
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = fresh(PARTIAL)
    step = tmg.make_train_step(model, optimizer, PARTIAL.loss, strategy)
    full, partial = tmg.distribute_dataset(PARTIAL.dataset(), strategy)
    step(full)
    before = model.calls
    step(partial)
    return Difference((model.calls - before) / 2, "further traces")


def ten_in_one_call() -> Difference:
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = fresh(EVEN)
    step = tmg.make_train_step(model, optimizer, EVEN.loss, strategy)
    step.run(iter(tmg.distribute_dataset(EVEN.dataset(), strategy)), 10)
    return weights(Trained(weights_of(model, strategy), []), one_device(EVEN))


REFUSED = "the error names the devices that exist"
CASES = [
    Device(
        name="missing-gpus",
        title='`MirroredStrategy(["GPU:0", "GPU:1"])` on a machine without GPUs, then training',
        plain=lambda: fitted(tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])),
        ours=asked_for("GPU:0", "GPU:1"),
        ours_kind="error",
        ours_says="DeviceNotFoundError: No such device",
        reason=REFUSED,
        alone=True,
        patience=12.0,
        sleeps=True,
    ),
    Device(
        name="one-missing-device",
        title='`MirroredStrategy(["CPU:0", "CPU:5"])` where there is only the first',
        plain=one_missing,
        ours=asked_for("CPU:0", "CPU:5"),
        ours_kind="error",
        ours_says="DeviceNotFoundError: No such device",
        reason=REFUSED,
        alone=True,
        virtual_cpus=2,
        patience=12.0,
    ),
    Device(
        name="no-devices",
        title="An empty list of devices",
        plain=no_devices,
        ours=none_asked_for,
        ours_kind="error",
        ours_says="devices",
        reason="an empty list is a mistake in the program that made it",
        alone=True,
    ),
    Device(
        name="second-strategy",
        title="Training on 2 devices, then on 4, in one process",
        plain=second_default_strategy,
        ours=second_strategy_of_ours,
        links=("tf#61314", "tf#62790"),
        plain_says="joining a group",
        alone=True,
    ),
    Device(
        name="split-late",
        title="Splitting a device after TensorFlow has started",
        plain=split_late_by_tensorflow,
        ours=split_late,
        ours_kind="error",
        ours_says="DevicesInitializedError",
        reason="TensorFlow cannot do it any more; the error says what started it, and where the "
        "line belongs",
        virtual_cpus=0,
        alone=True,
        ours_alone=True,
    ),
    Device(
        name="data-parallel",
        title="`keras.distribution.DataParallel` over two devices",
        plain=data_parallel,
        ours=both_devices,
        links=("k#21190",),
        alone=True,
    ),
    Device(
        name="steps-per-execution",
        title="`steps_per_execution=2` in `fit`; `step.run` here",
        plain=lambda: weights(by_fit(EVEN, steps_per_execution=2), one_device(EVEN)),
        ours=ten_in_one_call,
        links=("k#19246",),
        alone=True,
    ),
    Device(
        name="jit-compile",
        title="`jit_compile=True`",
        plain=lambda: weights(by_fit(EVEN, jit_compile=True), one_device(EVEN)),
        ours=lambda: weights(
            by_step(EVEN.replace(options={"jit_compile": True})), one_device(EVEN)
        ),
        links=("k#19005",),
        plain_says="Trying to access resource",
        alone=True,
    ),
    Device(
        name="traces",
        title="A smaller last batch: how often the step is traced again",
        plain=traces_of_a_loop,
        ours=traces_of_a_step,
    ),
]
