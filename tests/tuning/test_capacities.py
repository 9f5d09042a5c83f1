"""What each replica can take: the memory that is left, and measured speed."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of
from problems import network, normal_rows

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.addons.tuning import capacities, speeds
from tfmultigpu.strategies.topology import tf_variable

GIB = 1024**3

# Memory -------------------------------------------------------------------------------------------


def test_memory_given_in_order_or_by_name() -> None:
    strategy = strategy_of(2)
    assert tmg.memory_capacities(strategy, memory=[8 * GIB, 2 * GIB]) == (8 * GIB, 2 * GIB)
    by_name = {"cpu:1": 2 * GIB, "/device:CPU:0": 8 * GIB}
    assert tmg.memory_capacities(strategy, memory=by_name) == (8 * GIB, 2 * GIB)
    assert tmg.memory_capacities(memory=[3.0]) == (3.0,)


def test_of_a_limit_what_is_allocated_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in (4096, 1024) * 4]
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: limits)
    taken = {"CPU:0": {"current": GIB}, "CPU:1": {"current": 100}}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", taken.__getitem__)
    assert tmg.memory_capacities(strategy_of(2)) == (3 * GIB, GIB - 100)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, free: Any, growth: bool) -> None:
    """Puts two GPUs where the CPUs are, as the driver and TensorFlow would describe them."""
    devices = tuple(
        tmg.devices.Device(f"CPU:{i}", "CPU", i, memory_free=one) for i, one in enumerate(free)
    )
    physical = [tf.config.PhysicalDevice(f"/physical_device:{d.name}", "CPU") for d in devices]
    monkeypatch.setattr(capacities, "list_devices", lambda: devices)
    names = {device.name: device.name for device in devices}
    monkeypatch.setattr(capacities, "logical_to_physical", lambda: names)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: physical)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda device: growth)


def test_free_memory_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, free=(3 * GIB, GIB), growth=True)
    assert tmg.memory_capacities(strategy_of(2)) == (3 * GIB, GIB)
    assert tmg.memory_capacities(strategy_of(2), memory={"CPU:1": 7}) == (3 * GIB, 7)


def test_memory_that_tensorflow_has_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, free=(0.2 * GIB, 0.1 * GIB), growth=False)
    with pytest.raises(tmg.errors.DataError, match=r"have no meaning\. Call tmg\.enable_mem"):
        tmg.memory_capacities(strategy_of(2))


@pytest.mark.parametrize(
    ("memory", "error", "says"),
    [
        (5e9, TypeError, "not iterable"),
        ([GIB], ValueError, "shorter"),
        (["8GB", GIB], ValueError, "8GB"),
        ([float("nan"), GIB], tmg.errors.DataError, "Received: memory={'CPU:0': nan"),
        ([float("inf"), GIB], tmg.errors.DataError, "Received: memory={'CPU:0': inf"),
        ({"CPU:0": GIB, "CPU:1": -1}, tmg.errors.DataError, "'CPU:1': -1} for CPU:0, CPU:1."),
        ({"GPU:7": GIB}, tmg.errors.DataError, "memory={'GPU:7': 1073741824} for CPU:0, CPU:1."),
    ],
)
def test_what_is_no_memory_of_these_devices(memory: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        tmg.memory_capacities(strategy_of(2), memory=memory)


# Speed --------------------------------------------------------------------------------------------

(X,) = normal_rows(64, 4)
BATCH = (X, X[:, :1])


class Noise(keras.layers.Layer):
    """Draws without a seed of its own."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs))


class Counts(keras.layers.Layer):
    """Counts its calls in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, keras.KerasTensor):
            key = tf.constant([0], tf.int64)
            self.table.insert(key, self.table.lookup(key) + 1)
        return inputs


class Timed:
    """A real step on a clock of its own: how long it took depends on each replica's rows alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rows_per_second: float) -> None:
        self.strategy = strategy_of(len(rows_per_second))
        with self.strategy.scope():
            norm = keras.layers.BatchNormalization()
            self.counts = Counts()
            self.model = network(4, Noise(), norm, self.counts, keras.layers.Dense(1))
            self.optimizer = keras.optimizers.Adam()
            self.metrics = [keras.metrics.MeanSquaredError()]
        self.step = tmg.make_train_step(
            self.model, self.optimizer, "mse", self.strategy, metrics=self.metrics,
            loss_scale="dynamic", verify=False,
        )  # fmt: skip
        self.step((X[:8], X[:8, :1]))
        self.train_steps, self.runner = self.step.train_steps, self.step.runner
        self.rows_per_second, self.now = rows_per_second, 0.0
        monkeypatch.setattr(speeds.time, "perf_counter", lambda: self.now)

    def __call__(self, batch: Any) -> Any:
        shards = self.strategy.experimental_local_results(batch[0])
        rows = [int(shard.shape[0]) for shard in shards]
        parts = zip(rows, self.rows_per_second, strict=True)
        self.now += 0.5 + max(count / speed for count, speed in parts)
        return self.step(batch)


# Fails if what every step costs counts, if one copy is written to all replicas, or if a variable
# or a table that steps change is not restored.
@pytest.mark.parametrize("rows_per_second", [(400.0, 100.0), (100.0, 300.0, 200.0)])
def test_the_speed_of_each_replica_is_measured_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, rows_per_second: Any
) -> None:
    step = Timed(monkeypatch, *rows_per_second)
    local = step.strategy.experimental_local_results
    mean = local(step.model.layers[1].moving_mean.value)
    mean[1].assign_add(tf.ones([4]))  # As replicas differ that each normalize their own rows.

    def state() -> list[Any]:
        scale = [variable for feature in step.step.features for variable in feature.variables]
        assert len(scale) == 2
        owners = (step.model, step.optimizer, step.metrics[0])
        variables = [variable for owner in owners for variable in owner.variables]
        variables += [*scale, _compat.global_seeds().state]
        counted = step.counts.table.lookup(tf.constant([0], tf.int64))
        copies = [copy for v in variables for copy in local(tf_variable(v))]
        return [copy.numpy() for copy in [*copies, counted]]

    before = state()
    measured = tmg.measured_capacities(step, BATCH)
    np.testing.assert_allclose(measured, rows_per_second, rtol=1e-6)
    np.testing.assert_equal(before, state())


def test_one_replica_has_nothing_to_compare() -> None:
    model = network(4, keras.layers.Dense(1))
    step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
    assert tmg.measured_capacities(step, BATCH) == (1.0,)


def test_what_cannot_be_timed(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    step = Timed(monkeypatch, np.inf, np.inf)
    with pytest.raises(ValueError, match=r"at least 1\. .*: repeats=0"):
        tmg.measured_capacities(step, BATCH, repeats=0)
    data = tmg.distribute_dataset(BATCH, step.strategy, batch_size=64)
    for wrong in (data, next(iter(data)), "x", (X.tolist(), X.tolist()), 3.0):
        with (
            subtests.test(wrong=wrong),
            pytest.raises(tmg.errors.DataError, match=r"not yet divided\. Received: "),
        ):
            tmg.measured_capacities(step, wrong)
