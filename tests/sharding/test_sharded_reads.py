"""Reads of sharded variables: each waits for its turn, and the backward pass reads once more."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.steps.features import Pass
from tfmultigpu.strategies.topology import is_sharded, per_replica

LAYERS = 5
layers = keras.layers
_random = np.random.default_rng(3)
NUMBERS = _random.normal(size=(12, 4)).astype("float32")
IDS = _random.integers(1, 11, (12, 5)).astype("int32")


def dense() -> Any:
    hidden = [layers.Dense(4, "tanh", use_bias=False) for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((4,)), *hidden])


def gru() -> Any:
    ids = keras.Input((5,), dtype="int32")
    return keras.Model(ids, layers.Dense(4)(layers.GRU(6)(layers.Embedding(11, 4)(ids))))


def passes_of(strategy: Any, model: Any, *, bounded: bool) -> tuple[list[Any], Any]:
    """The gradients of two replicas, or the first's, and the graph that computes them."""
    values = [variable.value for variable in model.trainable_variables]
    feature = tmg.sharding.ShardedReads()
    step = SimpleNamespace(
        model=model if bounded else keras.Sequential(),
        variables=model.trainable_variables if bounded else [],
        features=[],
    )
    feature.bind(step)  # type: ignore[arg-type]

    def replica(x: Any) -> Any:
        with feature.around_model(None):  # type: ignore[arg-type]
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(tf.cast(model(x), tf.float32) ** 2)
            with feature.around_backward():
                return tape.gradient(total, values)

    def phase(_: Any) -> list[Pass]:
        rows = [tf.ones([2, 4]) * (i + 1) for i in range(2)]
        results = strategy.run(replica, args=(per_replica(strategy, rows),))
        local = [strategy.experimental_local_results(one) for one in results]
        return [Pass((tuple(one),), None, ()) for one in zip(*local, strict=True)]

    @tf.function
    def compute() -> Any:
        return [list(one.gradients[0]) for one in feature.around_phase(phase)(None)]  # type: ignore[arg-type]

    return compute(), compute.get_concrete_function().graph


def reads_of(graph: Any) -> list[Any]:
    return [one for one in graph.get_operations() if one.type == "ReadVariableOp"]


def users_of(read: Any) -> list[Any]:
    users = []
    for user in read.outputs[0].consumers():
        users += users_of(user) if user.type in ("Cast", "Identity") else [user]
    return users


def sharded(make: Any, replicas: int = 2) -> Any:
    with strategy_of(replicas).scope(), tmg.sharded_variables(at_least=0):
        return make()


# Fails if a copy of a weight is kept for the backward pass, or gradients are another's sum.
def test_the_backward_pass_reads_again_and_gradients_are_added_at_the_variable() -> None:
    strategy = strategy_of(2)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = sharded(dense)
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(is_sharded(variable) for variable in model.variables)
    plain, before = passes_of(strategy, model, bounded=False)
    bounded, after = passes_of(strategy, model, bounded=True)
    for first, second, total in zip(*plain, bounded[0], strict=True):
        np.testing.assert_array_equal(first + second, total)
    assert bounded[1] == [None] * LAYERS
    # Every replica read each weight once; the first layer needs none to go backward.
    assert len(reads_of(before)) == 2 * LAYERS
    assert len(reads_of(after)) == 2 * LAYERS + 2 * (LAYERS - 1)
    assert {len(users_of(one)) for one in reads_of(before)} == {1, 2}
    assert {len(users_of(one)) for one in reads_of(after)} == {1}
    sums = [one for one in after.get_operations() if one.type == "AddN"]
    assert sorted(one.device for one in sums) == sorted(v.value.device for v in model.variables)


# Fails if a replica copies all weights when a step begins, or runs ahead of the other.
def test_reads_wait_for_the_layer_before_and_for_the_other_replica() -> None:
    strategy = strategy_of(2)
    _, graph = passes_of(strategy, sharded(dense), bounded=True)
    numbers = {one: number for number, one in enumerate(graph.get_operations())}
    for device in map(parse_device_name, strategy.extended.worker_devices):
        own = [
            one for one in reads_of(graph) if parse_device_name(users_of(one)[0].device) == device
        ]
        own.sort(key=lambda one: numbers[users_of(one)[0]])
        forward = own[:LAYERS]
        multiplied = [users_of(one)[0] for one in forward]
        # The third read waits for what the first product gave, activated; and so on.
        for i in range(2, LAYERS):
            waits = {before.name for before in forward[i].control_inputs}
            needed = {tensor.op.name for tensor in multiplied[i - 1].inputs}
            assert waits & (needed - {forward[i - 1].name}), (i, waits, needed)
    sums = [one for one in graph.get_operations() if one.type == "AddN"]
    waiting = [one for one in reads_of(graph) if any(b in sums for b in one.control_inputs)]
    assert len(waiting) == 2 * (LAYERS - 1 - 2)


def step_of(make: Any, **options: Any) -> tuple[Any, Any]:
    model, strategy = sharded(make), strategy_of(2)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    return model, tmg.make_train_step(model, optimizer, "mse", strategy, verify=False, **options)


def graph_of(step: Any, batch: Any) -> Any:
    graphs: list[Any] = []

    @tf.function
    def look() -> Any:
        graphs.append(tf.compat.v1.get_default_graph())
        return step(batch)

    step(batch)
    look()
    return graphs[0]


def loops_in(graph: Any) -> Iterator[Any]:
    return (one for one in graph.get_operations() if one.type in ("While", "StatelessWhile"))


# Fails if each replica carries gradients of the whole model from micro-batch to micro-batch.
def test_micro_batches_carry_each_gradient_once_at_its_variable() -> None:
    model, step = step_of(
        lambda: keras.Sequential([keras.Input((4,)), *[layers.Dense(20) for _ in range(4)]]),
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


class TwoInOne(layers.Layer):
    """Operations whose gradients read two weights."""

    def build(self, shape: Any) -> None:
        self.a, self.b = self.add_weight(shape=(4, 4)), self.add_weight(shape=(4, 4))

    def call(self, x: Any) -> Any:
        apart = tf.reduce_sum(tf.math.squared_difference(self.a, self.b))
        return x @ tf.maximum(self.a, self.b) + apart


def used_twice() -> Any:
    """The gradient of the shared weight is there at its second use: waiting for it would hang."""
    x = inputs = keras.Input((4,))
    shared = layers.Dense(4, "tanh")
    for other in [layers.Dense(4, "tanh") for _ in range(3)]:
        x = shared(other(shared(x)))
    return keras.Model(inputs, x)


def several_outputs() -> Any:
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization(synchronized=True)(layers.Dense(4, "tanh")(inputs))
    return keras.Model(inputs, [layers.Dense(4)(hidden), layers.Dense(4)(hidden)])


class ReadInALoop(layers.Layer):
    """Reads a weight twice: a tape opened after the first read sees the second one only."""

    def __init__(self, taped: bool) -> None:
        super().__init__()
        self.taped = taped

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), initializer="orthogonal")
        self.bias = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def scaled(y: Any) -> Any:
            def gradient(upstream: Any, variables: Any = ()) -> Any:
                return upstream, [tf.reduce_sum(upstream * y, 0) for _ in variables]

            return y * self.bias.value, gradient

        def taped(y: Any) -> Any:
            y = tf.tanh(y @ self.kernel)
            with tf.GradientTape() as tape:
                energy = tf.reduce_sum(tf.stop_gradient(y[:1] * 0 + 1) @ self.kernel)
            slope = tape.gradient(energy, self.kernel.value, unconnected_gradients="zero")
            return y - 0.01 * y @ slope

        body = taped if self.taped else lambda y: scaled(tf.tanh(y + self.bias))
        x = x @ self.kernel + self.bias
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, body(y)), [0, x])[1]


def in_a_loop(taped: bool) -> Any:
    return keras.Sequential([keras.Input((4,)), ReadInALoop(taped), layers.Dense(4)])


MODELS = {
    "a custom gradient in a loop": lambda: in_a_loop(False),
    "a tape in a loop": lambda: in_a_loop(True),
    "two in one": lambda: keras.Sequential([keras.Input((4,)), TwoInOne(), layers.Dense(4)]),
    "used twice": used_twice,
    "several outputs": several_outputs,
    "gru": gru,
}


# Fails if a read waits for itself (it hangs), or a gradient is taken from another weight.
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_device(name: str) -> None:
    results = []
    for replicas in (1, 3):
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(2)
        model = MODELS[name]() if replicas == 1 else sharded(MODELS[name], replicas)
        with strategy.scope():
            adam = keras.optimizers.Adam(0.01)
        outputs = len(model.outputs)
        loss = "mse" if outputs == 1 else ["mse"] * outputs
        step = tmg.make_train_step(model, adam, loss, strategy, verify=False)
        x = IDS if name == "gru" else NUMBERS
        for rows in (7, 2, 12):
            target = np.ones((rows, 4), "float32")
            step((x[:rows], target if outputs == 1 else [target] * outputs))
        results.append(model.get_weights())
    for actual, value in zip(*results, strict=True):
        np.testing.assert_allclose(actual, value, rtol=2e-5, atol=2e-6)


# Fails if a strategy that once had sharded variables keeps a warning from naming the layer.
def test_a_layer_is_named_on_a_strategy_that_has_sharded_before() -> None:
    strategy = strategy_of(2)
    sharded(dense)
    with strategy.scope():
        norm = layers.BatchNormalization(name="local_norm")
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), norm, layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="local_norm"):
        step((NUMBERS, np.ones((12, 4), "float32")))
