"""What each replica can take: memory net of the model, and measured speed."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.addons.tuning import capacities, speeds

MIB = 1024**2
GIB = 1024**3


def built(strategy, optimizer=keras.optimizers.Adam, dtype="float32"):
    with strategy.scope():
        layers = [keras.Input((100,)), keras.layers.Dense(1000, dtype=dtype)]
        return keras.Sequential(layers), optimizer()


# Memory -------------------------------------------------------------------------------------------


def test_memory_given_in_order_or_by_name() -> None:
    strategy = strategy_of(2)
    assert tmg.memory_capacities(strategy, memory=[8 * GIB, 2 * GIB]) == (8 * GIB, 2 * GIB)
    by_name = {"cpu:1": 2 * GIB, "/device:CPU:0": 8 * GIB}
    assert tmg.memory_capacities(strategy, memory=by_name) == (8 * GIB, 2 * GIB)
    assert tmg.memory_capacities(memory=[3.0]) == (3.0,)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "bytes_of_weights", "times"),
    [
        (keras.optimizers.Adam, "float32", 404_000, 3 + 2),  # weights, two moments, gradients
        (keras.optimizers.SGD, "float32", 404_000, 1 + 2),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "float32", 404_000, 2 + 2),
        (keras.optimizers.Adam, "mixed_float16", 404_000, 3 + 2),
        (keras.optimizers.Adam, "float64", 808_000, 3 + 2),
    ],
    ids=["adam", "sgd", "momentum", "mixed", "float64"],
)
def test_what_is_on_every_replica_whole_is_not_for_rows(
    optimizer, dtype, bytes_of_weights, times
) -> None:
    strategy = strategy_of(2)
    model, optimizer = built(strategy, optimizer, dtype)
    left = tmg.memory_capacities(strategy, model=model, optimizer=optimizer, memory=[GIB, 2 * GIB])
    taken = GIB - left[0]
    assert left[1] - left[0] == GIB
    # The counter and the learning rate are a few bytes more.
    assert times * bytes_of_weights <= taken <= times * bytes_of_weights + 100


def test_gradients_of_low_precision_are_added_in_float32() -> None:
    strategy = strategy_of(2)
    model, _ = built(strategy, dtype="bfloat16")
    left = tmg.memory_capacities(strategy, model=model, memory=[GIB, GIB])
    assert GIB - left[0] == 101_000 * (2 + 2 * 4)


def test_frozen_weights_have_no_gradient() -> None:
    strategy = strategy_of(2)
    model, _ = built(strategy)
    model.trainable = False
    left = tmg.memory_capacities(strategy, model=model, memory=[GIB, GIB])
    assert GIB - left[0] == 404_000


def test_of_sharded_variables_a_device_holds_its_own() -> None:
    strategy = strategy_of(2)
    dense = keras.layers.Dense
    with strategy.scope(), tmg.sharded_variables(memory=[3 * GIB, GIB]):
        layers = [keras.Input((200,)), *[dense(200, use_bias=False) for _ in range(4)]]
        model, adam = keras.Sequential(layers), keras.optimizers.Adam()
    left = tmg.memory_capacities(strategy, model=model, optimizer=adam, memory=[3 * GIB, GIB])
    kernel = 4 * 200 * 200
    # Kernels with two moments and two gradients, and copies of two of the largest.
    assert [3 * GIB - left[0], GIB - left[1]] == [3 * 5 * kernel + 2 * kernel, 7 * kernel]


def test_of_layers_placed_by_hand_the_replica_holds_those_on_its_device() -> None:
    x = inputs = keras.Input((200,))
    for device in ("CPU:0", "CPU:1", "CPU:1"):
        with tf.device(device):
            x = keras.layers.Dense(200, use_bias=False)(x)
    model, adam = keras.Model(inputs, x), keras.optimizers.Adam()
    (left,) = tmg.memory_capacities(model=model, optimizer=adam, memory=[GIB])
    assert GIB - left == 5 * 4 * 200 * 200


def test_limits_of_split_devices(monkeypatch) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    limits = [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in (4096, 1024) * 4]
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: limits)
    assert cpu
    assert tmg.memory_capacities(strategy_of(2)) == (4 * GIB, GIB)


class FakeGpus:
    """Two GPUs where the CPUs are, as the driver and TensorFlow would describe them."""

    def __init__(self, monkeypatch, free, growth):
        devices = tuple(
            tmg.devices.Device(f"CPU:{i}", "CPU", i, memory_free=one) for i, one in enumerate(free)
        )
        physical = [
            tf.config.PhysicalDevice(f"/physical_device:CPU:{i}", "CPU") for i in range(len(free))
        ]
        monkeypatch.setattr(capacities, "list_devices", lambda: devices)
        monkeypatch.setattr(
            capacities, "logical_to_physical", lambda: {d.name: d.name for d in devices}
        )
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: physical)
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda device: None)
        monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda device: growth)


def test_free_memory_where_it_grows_has_the_weights_taken_already(monkeypatch) -> None:
    FakeGpus(monkeypatch, free=(3 * GIB, GIB), growth=True)
    strategy = strategy_of(2)
    model, optimizer = built(strategy)
    left = tmg.memory_capacities(strategy, model=model, optimizer=optimizer)
    assert left == (3 * GIB - 2 * 404_000, GIB - 2 * 404_000)


def test_memory_that_tensorflow_has_taken_whole(monkeypatch) -> None:
    FakeGpus(monkeypatch, free=(0.2 * GIB, 0.1 * GIB), growth=False)
    with pytest.raises(
        tmg.errors.DataError, match=r"has no meaning\. Call tmg\.enable_memory_growth\(\)"
    ):
        tmg.memory_capacities(strategy_of(2))


def test_the_memory_of_a_cpu_is_not_known() -> None:
    with pytest.raises(tmg.errors.DataError) as caught:
        tmg.memory_capacities(strategy_of(2), memory={"CPU:0": GIB})
    assert str(caught.value) == (
        "The memory of CPU:1 is not known. TensorFlow does not limit that of a CPU. Give it in "
        "bytes: memory_capacities(strategy, memory={'CPU:1': 8 * 1024**3})."
    )


def test_a_device_that_does_not_hold_the_model() -> None:
    strategy = strategy_of(2)
    model, optimizer = built(strategy)
    with pytest.raises(tmg.errors.DataError) as caught:
        tmg.memory_capacities(strategy, model=model, optimizer=optimizer, memory=[GIB, MIB])
    text = str(caught.value)
    assert text.startswith("CPU:1 does not hold the model. Received: 1.00 MiB, and")
    assert "weights and optimizer slots take 1.16 MiB, gradients 0.77 MiB." in text
    assert "Leave the device out" in text


def test_what_cannot_be_answered() -> None:
    strategy = strategy_of(2)
    with pytest.raises(tmg.errors.DataError, match="one number of bytes per replica"):
        tmg.memory_capacities(strategy, memory=[GIB])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(
        tmg.errors.DataError, match=r"no variables yet.*model\.build\(input_shape\)"
    ):
        tmg.memory_capacities(strategy, model=model, memory=[GIB, GIB])


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (
            5e9,
            "one number of bytes per replica of this process. Received: memory=5000000000.0 for 2",
        ),
        ("12", "one number of bytes per replica of this process. Received: memory=12 for 2"),
        ([GIB, None], "memory must be a positive number of bytes. Received: None for CPU:1."),
        ([float("nan"), GIB], "Received: nan for CPU:0."),
        ([float("inf"), GIB], "Received: inf for CPU:0."),
        (["8GB", GIB], "Received: '8GB' for CPU:0. Write 8 GB as 8 * 1024**3"),
        ({"CPU:0": GIB, "CPU:1": -1}, "Received: -1 for CPU:1."),
        (
            {"GPU:7": GIB},
            "memory names GPU:7, but no replica of this process is there. Received: "
            "memory={'GPU:7': 1073741824}; the replicas are on CPU:0, CPU:1.",
        ),
    ],
)
def test_what_is_no_memory_of_these_devices(memory, says) -> None:
    with pytest.raises(tmg.errors.DataError, match=re.escape(says)):
        tmg.memory_capacities(strategy_of(2), memory=memory)


def test_the_state_of_an_optimizer_without_its_model() -> None:
    with pytest.raises(tmg.errors.DataError, match=r"optimizer=Adam without a model\. Give both"):
        tmg.memory_capacities(memory=[GIB], optimizer=keras.optimizers.Adam())


# Speed --------------------------------------------------------------------------------------------


class Timed:
    """A real step on a clock of its own: how long it took depends on each replica's rows alone."""

    def __init__(self, step, rows_per_second, monkeypatch, overhead=0.5):
        self.step, self.rows_per_second, self.overhead = step, rows_per_second, overhead
        self.model, self.optimizer = step.model, step.optimizer
        self.metrics, self.strategy = step.metrics, step.strategy
        self.features = step.features
        self.changed_variables = step.changed_variables
        self.now = 0.0
        monkeypatch.setattr(speeds.time, "perf_counter", lambda: self.now)

    def __call__(self, batch):
        logs = self.step(batch)
        if isinstance(batch[0], tf.distribute.DistributedValues):
            shards = self.strategy.experimental_local_results(batch[0])
            rows = [int(shard.shape[0]) for shard in shards]
            parts = zip(rows, self.rows_per_second, strict=True)
            self.now += self.overhead + max(count / speed for count, speed in parts)
        return logs


class Noise(keras.layers.Layer):
    """Draws without a seed of its own."""

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs))


def timed(monkeypatch, rows_per_second):
    strategy = strategy_of(len(rows_per_second))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        error = keras.metrics.MeanSquaredError()
    step = tmg.make_train_step(
        model, optimizer, "mse", strategy, metrics=[error], loss_scale="dynamic"
    )
    step((X[:8], X[:8, :1]))
    return Timed(step, rows_per_second, monkeypatch)


X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


@pytest.mark.parametrize("speeds", [(400.0, 100.0), (100.0, 300.0, 200.0)])
def test_the_speed_of_each_replica_without_what_every_step_costs(monkeypatch, speeds) -> None:
    measured = tmg.measured_capacities(timed(monkeypatch, speeds), (X, X[:, :1]))
    np.testing.assert_allclose(measured, speeds, rtol=1e-6)


def test_measuring_changes_nothing(monkeypatch) -> None:
    step = timed(monkeypatch, (400.0, 100.0))

    def state():
        scale = [variable for feature in step.features for variable in feature.variables]
        scale.append(_compat.global_seeds().state)
        assert len(scale) == 3
        variables = [*step.model.variables, *step.optimizer.variables, *scale]
        return [v.numpy() for v in [*variables, *step.metrics[0].variables]]

    before = state()
    assert before[-1] == 8
    tmg.measured_capacities(step, (X, X[:, :1]))
    for one, other in zip(before, state(), strict=True):
        np.testing.assert_array_equal(one, other)


# Fails if one copy is written to all replicas, or if a variable is forgotten.
def test_measuring_restores_each_copy(monkeypatch) -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        model.add(keras.layers.Dense(1))
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    step((X[:8], X[:8, :1]))
    mean = strategy.experimental_local_results(model.layers[0].moving_mean.value)
    mean[1].assign_add(tf.ones([4]))  # As replicas differ that each normalize their own rows.
    before = [copy.numpy() for copy in mean]
    tmg.measured_capacities(Timed(step, (400.0, 100.0), monkeypatch), (X, X[:, :1]))
    for copy, value in zip(mean, before, strict=True):
        np.testing.assert_array_equal(copy.numpy(), value)


def test_a_step_that_was_never_called() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        step = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse", strategy)
    with pytest.raises(tmg.errors.DataError, match=r"Call step\(batch\) once\."):
        tmg.measured_capacities(step, (X, X[:, :1]))


def test_a_batch_too_small_to_make_a_difference(monkeypatch) -> None:
    step = timed(monkeypatch, (np.inf, np.inf))
    with pytest.raises(
        tmg.errors.DataError, match=r"More examples did not take a replica longer.*64 examples"
    ):
        tmg.measured_capacities(step, (X, X[:, :1]))


def test_one_replica_has_nothing_to_compare() -> None:
    model, optimizer = built(strategy_of(1))
    step = tmg.make_train_step(model, optimizer, "mse")
    assert tmg.measured_capacities(step, (np.zeros((8, 100)), np.zeros((8, 1000)))) == (1.0,)


def test_too_few_rows_to_time() -> None:
    strategy = strategy_of(2)
    model, optimizer = built(strategy)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    with pytest.raises(
        tmg.errors.DataError, match=r"a batch of 7 examples for 2 replicas\. Give at least 8"
    ):
        tmg.measured_capacities(step, (np.zeros((7, 100)), np.zeros((7, 1000))))


def test_what_cannot_be_timed(monkeypatch) -> None:
    step = timed(monkeypatch, (400.0, 100.0))
    with pytest.raises(TypeError, match=r"step must be a train step\. Received: step=None"):
        tmg.measured_capacities(None, (X, X))
    for repeats in (0, None, 1.5, True):
        with pytest.raises((TypeError, ValueError), match=rf"at least 1\. .*: repeats={repeats}"):
            tmg.measured_capacities(step, (X, X[:, :1]), repeats=repeats)
    data = tmg.distribute_dataset((X, X[:, :1]), step.strategy, batch_size=64)
    with pytest.raises(tmg.errors.DataError, match="divided already"):
        tmg.measured_capacities(step, next(iter(data)))
    for wrong in (data, "x", (X.tolist(), X.tolist()), 3.0):
        with pytest.raises(tmg.errors.DataError, match="Received"):
            tmg.measured_capacities(step, wrong)


def test_parts_of_a_batch_that_are_not_there(monkeypatch) -> None:
    measured = tmg.measured_capacities(timed(monkeypatch, (400.0, 100.0)), (X, X[:, :1], None))
    np.testing.assert_allclose(measured, (400.0, 100.0), rtol=1e-6)
