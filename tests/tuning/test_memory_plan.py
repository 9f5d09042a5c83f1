"""The plan of bytes on each device: what it says is what training then takes."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import unused_strategy

import tfmultigpu as tmg
from tfmultigpu.strategies.topology import is_sharded

KERNEL = 4 * 64 * 64


def build() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            *[layers.Dense(64, "relu", use_bias=False) for _ in range(4)],
            layers.BatchNormalization(),
            layers.Dense(3, dtype="float32"),
        ]
    )


def model_on(strategy: tf.distribute.Strategy, at_least: int = KERNEL) -> keras.Model:
    with strategy.scope(), tmg.sharded_variables(at_least=at_least):
        return build()


def test_a_plan_without_memory_is_that_of_the_model_made() -> None:
    strategy = unused_strategy(2)
    adam = keras.optimizers.Adam()
    before = tmg.tuning.plan_memory(build, adam, strategy, rows=20, at_least=KERNEL)
    after = tmg.tuning.plan_memory(model_on(strategy), adam, strategy, rows=20)
    assert [one.device for one in before.variables] == [one.device for one in after.variables]
    for device in before.devices:
        assert before.bytes_on(device) == after.bytes_on(device)
    kernels = [one for one in before.variables if one.device is not None]
    assert [one.device for one in kernels] == ["CPU:0", "CPU:1", "CPU:0", "CPU:1"]
    assert {one.parameters for one in kernels} == {KERNEL}
    assert {one.optimizer_state for one in kernels} == {2 * KERNEL}
    # Ten rows on a replica: the outputs of four dense layers, the normalization, and the last one.
    assert before.activations == (10 * 4 * (4 * 64 + 64 + 3),) * 2


@pytest.mark.parametrize("how", ["frozen", "made frozen", "LoRA"])
def test_what_is_frozen_after_it_was_made_is_sharded_too(how: str) -> None:
    def made() -> keras.Model:
        options = {"use_bias": False, "trainable": how != "made frozen"}
        inner = [keras.layers.Dense(64, **options) for _ in range(3)]
        model = keras.Sequential([keras.Input((64,)), *inner, keras.layers.Dense(3)])
        for layer in inner:
            if how == "LoRA":
                layer.enable_lora(2)
            layer.trainable = layer.trainable and how != "frozen"
        return model

    strategy, sgd = unused_strategy(2), keras.optimizers.SGD(0.1, momentum=0.9)
    with strategy.scope(), tmg.sharded_variables(at_least=KERNEL):
        after = tmg.tuning.plan_memory(made(), sgd, strategy)
    before = tmg.tuning.plan_memory(made, sgd, strategy, at_least=KERNEL)
    assert [one.device for one in before.variables] == [one.device for one in after.variables]
    assert sum(one.device is not None for one in before.variables) == 3
    assert [before.bytes_on(one) for one in before.devices] == [
        after.bytes_on(one) for one in after.devices
    ]


def test_arguments_of_another_kind() -> None:
    with pytest.raises(
        TypeError, match=r"Received: str\. Write tmg\.tuning\.plan_memory\(build, keras"
    ):
        tmg.tuning.plan_memory(build, "adam")
    with pytest.raises(ValueError, match=r"no such device\. Received: 'CPU:9'; the plan has CPU:0"):
        tmg.tuning.plan_memory(build, None, unused_strategy(2)).bytes_on("CPU:9")


def test_a_class_makes_the_model() -> None:
    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

    class Built(Lazy):
        def __init__(self) -> None:
            super().__init__()
            self.dense.build((None, 4))
            self.built = True

    with pytest.raises(tmg.ScopeError, match="has no variables yet"):
        tmg.tuning.plan_memory(Lazy)
    assert len(tmg.tuning.plan_memory(Built, None, unused_strategy(2)).variables) == 2


def test_the_optimizer_state_of_the_plan_is_that_of_a_step() -> None:
    strategy = unused_strategy(2)
    model = model_on(strategy)
    with strategy.scope():
        adam = keras.optimizers.Adam()
    plan = tmg.tuning.plan_memory(model, adam, strategy)
    step = tmg.make_train_step(model, adam, "mse", strategy, shard_update=True)
    step((np.ones((4, 64), "float32"), np.ones((4, 3), "float32")))
    found = dict.fromkeys(plan.devices, 0)
    for slot in adam.variables[2:]:
        device = tmg.devices.names.parse_device_name(slot.value.device)
        found[device] += slot.value.shape.num_elements() * 4
    expected = {
        device: sum(one.optimizer_state for one in plan.variables if one.owner == device)
        for device in plan.devices
    }
    assert sum(found.values()) == sum(expected.values())
    assert abs(found["CPU:0"] - expected["CPU:0"]) < KERNEL


def test_a_plan_allocates_nothing_and_draws_nothing() -> None:
    def huge() -> keras.Model:
        return keras.Sequential([keras.Input((10**6,)), keras.layers.Dense(10**6)])  # 4 TB.

    keras.utils.set_random_seed(3)
    state = random.getstate()
    plan = tmg.tuning.plan_memory(huge, keras.optimizers.Adam(), unused_strategy(4))
    assert random.getstate() == state
    assert plan.bytes_on(plan.variables[0].device or "") > 16 * 10**12
    variable = keras.Variable(1.0)  # Nothing waits to be initialized on this thread.
    with keras.StatelessScope():
        pass
    assert float(variable.numpy()) == 1.0


def test_the_policy_of_the_caller_counts() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        plan = tmg.tuning.plan_memory(build, None, unused_strategy(2), rows=20, at_least=KERNEL)
    finally:
        keras.config.set_dtype_policy(before)
    assert plan.activations == (10 * (2 * (4 * 64 + 64) + 4 * 3),) * 2


def test_what_fits_on_no_device_is_an_error_with_the_plan() -> None:
    memory = {"CPU:0": KERNEL, "CPU:1": 50 * KERNEL}
    strategy = unused_strategy(2)
    plan = tmg.tuning.plan_memory(
        build, keras.optimizers.Adam(), strategy, at_least=KERNEL, memory=memory
    )
    kernels = [one.device for one in plan.variables if one.device is not None]
    assert kernels.count("CPU:1") > kernels.count("CPU:0")
    with pytest.raises(
        tmg.errors.DataError, match=r"CPU:0 has not enough memory.*KiB needed of 16.0 KiB"
    ):
        plan.check()
    text = str(plan)
    assert "dense/kernel" in text
    assert "16.0 KiB" in text
    assert len({line.index("CPU") for line in text.split("\n\n")[0].splitlines()[1:]}) == 1
    fits = tmg.tuning.plan_memory(build, None, strategy, memory=[1e9, 1e9])
    fits.check()


def test_a_model_without_shapes_is_refused() -> None:
    with pytest.raises(tmg.ScopeError, match=r"Begin it with keras.Input"):
        tmg.tuning.plan_memory(lambda: keras.Sequential([keras.layers.Dense(3)]))


def test_on_one_device_all_is_there() -> None:
    plan = tmg.tuning.plan_memory(build, keras.optimizers.SGD())
    assert {one.device for one in plan.variables} == {None}
    assert len(plan.devices) == 1
    assert not any(is_sharded(variable) for variable in build().variables)


def by_hand() -> keras.Model:
    x = inputs = keras.Input((64,))
    for device, count in (("CPU:1", 1), ("CPU:2", 2)):
        with tf.device(device):
            for _ in range(count):
                x = keras.layers.Activation("tanh")(keras.layers.Dense(64, use_bias=False)(x))
    return keras.Model(inputs, x)


def test_layers_placed_by_hand_are_counted_where_they_are() -> None:
    adam = keras.optimizers.Adam()
    before = tmg.tuning.plan_memory(by_hand, adam, rows=10)
    model = by_hand()
    after = tmg.tuning.plan_memory(model, adam, rows=10)
    assert before.devices == after.devices == ("CPU:1", "CPU:2")
    for plan in (before, after):
        assert [one.device for one in plan.variables] == ["CPU:1", "CPU:2", "CPU:2"]
        activations = 4 * 10 * 64
        assert plan.parts_on("CPU:1") == (KERNEL, KERNEL, 2 * KERNEL, 0, 2 * activations)
        expected = (2 * KERNEL, 2 * KERNEL, 4 * KERNEL, 0, 4 * activations)
        assert plan.parts_on("CPU:2") == expected
    step = tmg.make_train_step(model, adam, "mse")
    step((np.ones((4, 64), "float32"), np.ones((4, 64), "float32")))
    found = dict.fromkeys(before.devices, 0)
    for slot in adam.variables[2:]:
        device = tmg.devices.names.parse_device_name(slot.value.device)
        found[device] += slot.value.shape.num_elements() * 4
    assert found == {device: before.parts_on(device)[2] for device in before.devices}


def test_layers_placed_by_hand_that_do_not_fit() -> None:
    memory = {"CPU:1": 5 * KERNEL, "CPU:2": 5 * KERNEL}
    plan = tmg.tuning.plan_memory(by_hand, keras.optimizers.Adam(), memory=memory)
    with pytest.raises(tmg.errors.DataError, match="CPU:2 has not enough memory"):
        plan.check()
