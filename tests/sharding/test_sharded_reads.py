"""Reads of sharded variables: each waits for its turn, and the backward pass reads once more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from cases.sharded import gru
from one_device import graph_of, step_on, strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.strategies.topology import is_sharded

LAYERS = 5
layers = keras.layers
_random = np.random.default_rng(3)
NUMBERS = _random.normal(size=(12, 4)).astype("float32")
IDS = _random.integers(1, 11, (12, 5)).astype("int32")


def dense() -> Any:
    hidden = [layers.Dense(4, "tanh", use_bias=False) for _ in range(LAYERS)]
    return network(4, *hidden)


def sharded(make: Any, replicas: int = 2) -> Any:
    with strategy_of(replicas).scope(), tmg.sharded_variables(at_least=0):
        return make()


def step_of(make: Any, **options: Any) -> tuple[Any, Any]:
    model, strategy = sharded(make), strategy_of(2)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    return model, tmg.make_train_step(model, optimizer, "mse", strategy, verify=False, **options)


def loops_in(graph: Any) -> Iterator[Any]:
    return (one for one in graph.get_operations() if one.type in ("While", "StatelessWhile"))


def users_of(read: Any) -> list[Any]:
    users = []
    for user in read.outputs[0].consumers():
        users += users_of(user) if user.type in ("Cast", "Identity") else [user]
    return users


# Fails if a copy of a weight is kept for the backward pass, if a replica copies all weights when a
# step begins or runs ahead of the other, or if gradients are added elsewhere.
def test_each_read_waits_for_its_turn_and_the_backward_pass_reads_again() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model, step = step_of(dense)
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(is_sharded(variable) for variable in model.variables)
    graph = graph_of(step, (NUMBERS, np.ones((12, 4), "float32")))
    order = {operation: number for number, operation in enumerate(graph.get_operations())}
    users = {one: users_of(one) for one in order if one.type == "ReadVariableOp"}
    reads = [one for one in users if any(user.type == "MatMul" for user in users[one])]
    # Every replica reads each weight once; the first layer needs none to go backward.
    assert len(reads) == 2 * LAYERS + 2 * (LAYERS - 1)
    assert {len(users[one]) for one in reads} == {1}
    for device in map(parse_device_name, step.strategy.extended.worker_devices):
        own = [one for one in reads if parse_device_name(users[one][0].device) == device]
        own.sort(key=lambda one: order[users[one][0]])
        # The third read waits for what the first product gave, activated; and so on.
        for i in range(2, LAYERS):
            waits = {before.name for before in own[i].control_inputs}
            needed = {tensor.op.name for tensor in users[own[i - 1]][0].inputs}
            assert waits & (needed - {own[i - 1].name}), (i, waits, needed)
    sums = [one for one in order if one.type == "AddN" and one.outputs[0].shape.rank == 2]
    assert sorted(one.device for one in sums) == sorted(v.value.device for v in model.variables)
    waiting = [one for one in reads if any(before in sums for before in one.control_inputs)]
    assert len(waiting) == 2 * (LAYERS - 1 - 2)


# Fails if each replica carries gradients of the whole model from micro-batch to micro-batch.
def test_micro_batches_carry_each_gradient_once_at_its_variable() -> None:
    model, step = step_of(
        lambda: network(4, *[layers.Dense(20) for _ in range(4)]),
        micro_batches=4,
    )
    graph = graph_of(step, (NUMBERS, np.ones((12, 20), "float32")))
    (loop,) = loops_in(graph)
    kernels = [v for v in model.trainable_variables if tuple(v.shape) == (20, 20)]
    carried = [tensor for tensor in loop.inputs if tuple(tensor.shape) == (20, 20)]
    assert len(carried) == len(kernels) == 3
    assert {one.device for one in carried} == {v.value.device for v in kernels}
    name = loop.get_attr("body").name
    (body,) = [f for f in graph.as_graph_def().library.function if f.signature.name == name]
    added = {one.name: one for one in body.node_def if one.op == "AddN"}
    waiting = [
        one
        for one in body.node_def
        if one.op == "ReadVariableOp" and any(n[0] == "^" and n[1:] in added for n in one.input)
    ]
    assert waiting  # Replicas go backward together here too.


# Fails if a loop of a layer copies a weight in each turn, and keeps each copy.
def test_loops_read_no_weights() -> None:
    _, step = step_of(gru)
    graph = graph_of(step, (IDS, np.ones((12, 4), "float32")))
    functions = list(graph.as_graph_def().library.function)
    assert len(list(loops_in(graph))) >= 4  # Two replicas, forward and backward.
    assert not [n.name for f in functions for n in f.node_def if n.op == "ReadVariableOp"]
    for loop in loops_in(graph):
        copies = [tensor for tensor in loop.inputs if tensor.op.type == "Identity"]
        weights = [one for one in copies if one.op.inputs[0].op.type == "ReadVariableOp"]
        assert weights
        # TensorFlow carries them where they come from: elsewhere each turn would copy them.
        assert {one.device for one in weights} == {loop.device}
        for one in weights:  # The backward pass has copies of its own.
            assert one.consumers() == [loop]
    assert len({one.device for one in loops_in(graph)}) == 2


# Fails if a strategy that once had sharded variables keeps a warning from naming the layer.
def test_a_layer_is_named_on_a_strategy_that_has_sharded_before() -> None:
    sharded(dense)

    def build() -> Any:
        norm = layers.BatchNormalization(name="local_norm")
        return network(4, layers.Dense(4), norm, layers.Dense(4))

    step = step_on(2, build, keras.optimizers.SGD, "mse")
    with pytest.warns(tmg.ReplicaDependenceWarning, match="local_norm"):
        step((NUMBERS, np.ones((12, 4), "float32")))
