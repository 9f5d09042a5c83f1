"""Where sharded variables are, and what is refused; their results are in cases and promises."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.sharded import X, Y, mlp
from one_device import strategy_of, unused_strategy
from problems import crossentropy, network

import tfmultigpu as tmg
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.strategies.topology import is_sharded

layers = keras.layers


def sharded(make: Any) -> Any:
    """Makes it sharded over two replicas."""
    with strategy_of(2).scope(), tmg.sharded_variables(at_least=0):
        return make()


def device_of(variable: Any) -> str:
    name: str = parse_device_name(variable.value.device)
    return name


# Fails if devices are not chosen by the memory that is given, or the table has other numbers.
def test_devices_are_chosen_by_memory() -> None:
    def on(*memory: float, make: Any) -> Any:
        sizes = {f"CPU:{i}": size for i, size in enumerate(memory)}
        with unused_strategy(2).scope(), tmg.sharded_variables(at_least=0, memory=sizes):
            return make()

    def deep(count: int) -> Any:
        return network(32, *[layers.Dense(32) for _ in range(count)])

    model = on(3e6, 1e6, make=lambda: deep(12))
    places = [device_of(variable) for variable in model.variables if len(variable.shape) == 2]
    assert (places.count("CPU:0"), places.count("CPU:1")) == (9, 3)
    made = on(16, 1000, make=lambda: [keras.Variable(np.ones(n, "float32")) for n in (8, 2)])
    assert {device_of(variable) for variable in made} == {"CPU:1"}
    says = r"4,096 bytes, after CPU:0: .* of 5,000 bytes"
    with pytest.raises(tmg.errors.DataError, match=says):
        on(5000, 5000, make=lambda: deep(4))


# Fails if a model that nobody uses is still counted.
def test_the_memory_of_an_earlier_model_is_free_again() -> None:
    strategy, room = unused_strategy(2), {"CPU:0": 1e4, "CPU:1": 1e4}
    for _ in range(3):
        model = None
        gc.disable()  # As if it had not come to it yet.
        try:
            with strategy.scope(), tmg.sharded_variables(at_least=0, memory=room):
                model = network(64, layers.Dense(32), layers.Dense(64))
                model.compile("sgd", "mse")
            tmg.fit(model, np.ones((4, 64)), np.ones((4, 64)), verbose=0)
        finally:
            gc.enable()


# Fails if a limit outlives its context, or a model that is built later is mirrored.
def test_inner_limits_and_models_that_are_built_later() -> None:
    def kernel() -> bool:
        dense = layers.Dense(4)
        dense.build((None, 4))
        return is_sharded(dense.kernel)

    with strategy_of(2).scope(), tmg.sharded_variables(at_least=0):
        before = kernel()
        with tmg.sharded_variables(at_least=10**6):
            within = kernel()
        assert (before, within, kernel()) == (True, False, True)
    model = sharded(lambda: keras.Sequential([layers.Dense(16), layers.Dense(3)]))
    with strategy_of(2).scope():
        sgd = keras.optimizers.SGD(0.1)
    tmg.make_train_step(model, sgd, crossentropy(), strategy_of(2))((X, Y))
    assert all(map(is_sharded, model.trainable_variables))


# Fails if a replica writes to a variable that all share, by whichever method.
def test_replicas_may_not_write(subtests: pytest.Subtests) -> None:
    kernel = sharded(lambda: keras.Variable(np.ones((2, 2), "float32")))
    for write in (
        lambda v: v.assign(tf.zeros((2, 2))),
        lambda v: v.assign_add(tf.ones((2, 2))),
        lambda v: v.scatter_add(tf.IndexedSlices(tf.ones((1, 2)), [0])),
        lambda v: v.scatter_nd_update([[0, 0]], [3.0]),
        lambda v: v[0].assign([5.0, 6.0]),
    ):
        with subtests.test(write=write):
            with pytest.raises(tmg.TfMultiGpuError, match=r"none may write[\s\S]*trainable=False"):
                strategy_of(2).run(write, args=(kernel.value,))
            np.testing.assert_array_equal(kernel.numpy(), np.ones((2, 2)))
    kernel.value[0].assign([5.0, 6.0])  # Once, outside of replicas, it can be written.
    np.testing.assert_array_equal(kernel.numpy(), [[5, 6], [1, 1]])


# Fails if TensorFlow's assertion comes up, or a replica updates.
def test_only_a_step_updates() -> None:
    model, strategy = sharded(mlp), strategy_of(2)
    variables = model.trainable_variables
    before = [one.numpy() for one in variables]
    with strategy.scope():
        model.compile("sgd", crossentropy())
    with pytest.raises(tmg.TfMultiGpuError, match=r"updated once[\s\S]*tmg\.fit\(model, data\)"):
        model.fit(X[:8], Y[:8], verbose=0)
    for one, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(one, variable.numpy())


# Fails if what cannot be had is taken in silence.
def test_what_is_refused() -> None:
    model, strategy = sharded(mlp), strategy_of(2)
    with strategy.scope():
        sgd = keras.optimizers.SGD(0.1)
    with pytest.raises(tmg.TfMultiGpuError, match="Leave shard_update out"):
        tmg.make_train_step(model, sgd, crossentropy(), strategy, shard_update=False)
    with unused_strategy(2).scope():
        with pytest.raises(tmg.errors.DataError, match="for each device"):
            tmg.sharded_variables(memory={"CPU:0": 1e9, "CPU:1": 0}).__enter__()
        for at_least, error in (("64k", TypeError), (-1, ValueError)):
            with pytest.raises(error, match=r"at_least must be a whole number"):
                tmg.sharded_variables(at_least=at_least).__enter__()
