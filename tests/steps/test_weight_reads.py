"""Reads of sharded variables: each waits for its turn, and the backward pass reads once more."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.steps.weight_reads import bounding_reads
from tfmultigpu.strategies.topology import per_replica
from tfmultigpu.strategies.variable_sharding import is_sharded

LAYERS = 5


def model_on(strategy: Any, policy: str = "float32") -> Any:
    with strategy.scope(), tmg.sharded_variables(at_least=0):
        dense = [keras.layers.Dense(4, "tanh", use_bias=False, dtype=policy) for _ in range(LAYERS)]
        return keras.Sequential([keras.Input((4,)), *dense])


def gradients_of(strategy: Any, model: Any, *, bounded: bool) -> tuple[Any, Any]:
    """The gradients of each replica, and the graph that computes them."""
    values = [variable.value for variable in model.trainable_variables]

    def replica(x: Any) -> Any:
        with bounding_reads(model.variables if bounded else []) as reads:
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.cast(model(x), tf.float32) ** 2)
            reads.backward_begins()
            found = tape.gradient(total, values)
            reads.backward_ends()
        return found

    @tf.function
    def step() -> Any:
        count = strategy.num_replicas_in_sync
        rows = [tf.ones([2, 4]) * (i + 1) for i in range(count)]
        results = strategy.run(replica, args=(per_replica(strategy, rows),))
        return [strategy.experimental_local_results(one) for one in results]

    return step(), step.get_concrete_function().graph


def reads_of(graph: Any) -> list[Any]:
    return [one for one in graph.get_operations() if one.type == "ReadVariableOp"]


def users_of(read: Any) -> list[Any]:
    found = []
    for user in read.outputs[0].consumers():
        found += users_of(user) if user.type in ("Cast", "Identity") else [user]
    return found


def test_the_backward_pass_reads_again() -> None:
    strategy = strategy_of(2)
    model = model_on(strategy, "mixed_bfloat16")
    assert all(is_sharded(variable) for variable in model.variables)
    plain, before = gradients_of(strategy, model, bounded=False)
    found, after = gradients_of(strategy, model, bounded=True)
    for one, other in zip(plain, found, strict=True):
        for here, there in zip(one, other, strict=True):
            np.testing.assert_array_equal(here, there)
    # Every replica read each weight once; the first layer needs none to go backward.
    assert len(reads_of(before)) == 2 * LAYERS
    assert len(reads_of(after)) == 2 * LAYERS + 2 * (LAYERS - 1)
    assert {len(users_of(one)) for one in reads_of(before)} == {1, 2}
    assert {len(users_of(one)) for one in reads_of(after)} == {1}


def test_reads_wait_for_the_layer_before() -> None:
    strategy = strategy_of(2)
    model = model_on(strategy)
    _, graph = gradients_of(strategy, model, bounded=True)
    for device in strategy.extended.worker_devices:
        own = [
            one
            for one in reads_of(graph)
            if parse_device_name(users_of(one)[0].device) == parse_device_name(device)
        ]
        own.sort(key=lambda one: graph.get_operations().index(users_of(one)[0]))
        own = own[:LAYERS]  # Those of the forward pass.
        multiplied = [users_of(one)[0] for one in own]
        # The third read waits for what the first product gave, activated; and so on.
        for i in range(2, len(own)):
            waits = {before.name for before in own[i].control_inputs}
            needed = {tensor.op.name for tensor in multiplied[i - 1].inputs} - {own[i - 1].name}
            assert waits & needed, (i, waits, needed)


def test_replicas_go_backward_together() -> None:
    strategy = strategy_of(2)
    model = model_on(strategy)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    batch = np.ones((6, 4), "float32"), np.ones((6, 4), "float32")
    step(batch)
    graphs: list[Any] = []

    @tf.function
    def look() -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return step(batch)

    look()
    added = [one for one in graphs[0].get_operations() if one.type == "AddN"]
    waiting = [one for one in reads_of(graphs[0]) if any(b in added for b in one.control_inputs)]
    assert len(waiting) == 2 * (LAYERS - 1 - 2)


def test_weights_that_are_used_twice() -> None:
    """The gradient of the shared weight is there at its second use: waiting for it would hang."""

    def build() -> Any:
        x = inputs = keras.Input((4,))
        shared = keras.layers.Dense(4, "tanh")
        others = [keras.layers.Dense(4, "tanh") for _ in range(3)]
        x = shared(x)
        for one in others:
            x = shared(one(x))
        return keras.Model(inputs, x)

    strategy = strategy_of(2)

    def losses(shards: bool) -> list[float]:
        keras.utils.set_random_seed(2)
        with strategy.scope():
            if shards:
                with tmg.sharded_variables(at_least=0):
                    model = build()
            else:
                model = build()
            optimizer = keras.optimizers.SGD(0.1)
        step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
        batch = np.ones((6, 4), "float32"), np.ones((6, 4), "float32")
        return [float(step(batch)["loss"]) for _ in range(3)]

    np.testing.assert_allclose(losses(True), losses(False), rtol=1e-6)


def test_without_sharded_variables_nothing_is_looked_at() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    with bounding_reads(model.variables) as reads:
        model(tf.ones([1, 4]))
    assert reads.reads == []
