"""Gradients are sent while the backward pass still runs: most bytes do not wait for its last part.

The step is traced and never run, so the strategy may name GPUs that are not here. Replicas on CPUs
of one process add in memory: there nothing is sent.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

LAYERS, REPLICAS = 8, 2
WIDTH = 2560  # A kernel has 26 MB, as much as one message is to carry.
MESSAGE = re.compile("AllReduce|CollectiveReduce")


class Dependencies:
    """What each operation of a graph waits for, with the bodies of called functions in place.

    Attributes:
        inputs: For each operation, by path, what it reads or is ordered after.
        kinds: The type of each operation.
        sizes: The bytes that it returns first.
    """

    def __init__(self, graph: Any) -> None:
        definition = graph.as_graph_def(add_shapes=True)
        self.inputs: dict[str, list[str]] = {}
        self.kinds: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._bodies = {one.signature.name: one for one in definition.library.function}
        self._add(definition.node, "", {})

    def _add(self, nodes: Any, path: str, arguments: dict[str, str]) -> None:
        """Adds operations; ``arguments`` of their function are operations outside of it."""
        nodes = list(nodes)
        calls = {node.name for node in nodes if self._called(node)}

        def place(tensor: str) -> str:
            name, *rest = tensor.removeprefix("^").split(":")
            if name in arguments:
                return arguments[name]
            output = f"#{rest[-1] if rest else 0}" if name in calls and tensor[0] != "^" else ""
            return path + name + output

        for node in nodes:
            name, inputs = path + node.name, [place(one) for one in node.input]
            self.inputs[name], self.kinds[name] = inputs, node.op
            if node.attr["_output_shapes"].list.shape:
                shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
                dtype = tf.as_dtype(node.attr["T"].type or tf.float32)
                self.sizes[name] = (shape.num_elements() or 0) * dtype.size
            values = [place(one) for one in node.input if one[0] != "^"]
            for body in self._called(node):
                names = [argument.name for argument in body.signature.input_arg]
                # A branch is not given the condition, which comes first.
                outer = dict(zip(names, values[len(values) - len(names) :], strict=True))
                self._add(body.node_def, f"{name}/", outer)
                self._connect(body, name, outer)

    def _connect(self, body: Any, name: str, arguments: dict[str, str]) -> None:
        """Makes what a call returns wait for what its body computes for it."""
        nested = {node.name for node in body.node_def if self._called(node)}
        for index, output in enumerate(body.signature.output_arg):
            inner, *rest = body.ret[output.name].split(":")
            suffix = f"#{rest[-1]}" if inner in nested else ""
            source = arguments.get(inner, f"{name}/{inner}{suffix}")
            self.inputs.setdefault(f"{name}#{index}", []).append(source)
        # What is ordered after the call waits for all of it.
        self.inputs[name] += [f"{name}/{node.name}" for node in body.node_def]

    def _called(self, node: Any) -> list[Any]:
        functions = [value.func.name for value in node.attr.values() if value.HasField("func")]
        return [self._bodies[name] for name in functions if name in self._bodies]

    def of_kind(self, pattern: str | re.Pattern[str]) -> list[str]:
        return [name for name, kind in self.kinds.items() if re.search(pattern, kind)]

    def before(self, name: str) -> set[str]:
        """Returns all that an operation waits for."""
        seen, left = set(), [name]
        while left:
            for one in self.inputs.get(left.pop(), ()):
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        return seen


def layers(count: int) -> Iterator[Any]:
    for _ in range(count):
        # Zeros, because nothing is computed with them.
        yield keras.layers.Dense(WIDTH, use_bias=False, kernel_initializer="zeros")


@functools.cache
def traced() -> Dependencies:
    """Returns the graph of a step on a stack of layers, traced in a function of the user's own."""
    strategy = tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), *layers(LAYERS)])
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    batch = np.zeros([4, WIDTH], "float32")
    data = tmg.distribute_dataset((batch, batch), strategy, batch_size=4)

    @tf.function
    def train(iterator: Any) -> Any:
        return step(next(iterator))["loss"]

    return Dependencies(train.get_concrete_function(iter(data)).graph)


def last_of_backward(graph: Dependencies) -> set[str]:
    """Returns the last part of the backward pass on each replica.

    That is the product of matrices that waits for most others: it makes the gradient of the first
    layer, after the forward pass and the backward pass through all layers above.
    """
    products = set(graph.of_kind("^MatMul$"))
    waits = {name: len(products & graph.before(name)) for name in products}
    return {name for name in products if waits[name] == 2 * LAYERS - 1}


def messages(graph: Dependencies) -> dict[str, int]:
    """Returns the bytes of each message that a replica sends."""
    return {name: graph.sizes[name] for name in graph.of_kind(MESSAGE)}


# Fails if a gradient is not sent, is sent twice or is sent in a wider dtype.
def test_every_gradient_is_sent_once() -> None:
    gradients = REPLICAS * LAYERS * WIDTH**2 * 4
    assert len(last_of_backward(traced())) == REPLICAS
    assert gradients <= sum(messages(traced()).values()) < gradients + 1000


# Fails if gradients are packed into one message, or if the first layers are sent first.
def test_at_least_80_percent_of_the_bytes_leave_before_the_backward_pass_ends() -> None:
    last, sent = last_of_backward(traced()), messages(traced())
    early = [name for name in sent if not last & traced().before(name)]
    assert sum(sent[name] for name in early) >= 0.8 * sum(sent.values())
