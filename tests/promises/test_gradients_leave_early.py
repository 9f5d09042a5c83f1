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
from law.graphs import Dependencies

import tfmultigpu as tmg

LAYERS, REPLICAS = 8, 2
WIDTH = 2560  # A kernel has 26 MB, as much as one message is to carry.
MESSAGE = re.compile("AllReduce|CollectiveReduce")


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
