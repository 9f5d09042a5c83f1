"""What layers and metrics assign is deferred, and read meanwhile, as if it had been assigned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import Replicated, cut, hold

import tfmultigpu as tmg
from tfmultigpu.steps.assignments import deferring

_random = np.random.default_rng(43)
X = _random.normal(size=(16, 4)).astype("float32")
Y = _random.normal(size=(16, 1)).astype("float32")
BATCHES = cut((X, Y), (7, 1, 5, 2))
SQUARES = keras.losses.MeanSquaredError()


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def in_graph(function: Callable[[], Any]) -> Any:
    return tf.function(function, autograph=False)()


# The scope ----------------------------------------------------------------------------------------


def test_what_an_inner_graph_assigns_is_assigned_at_once() -> None:
    count, total = keras.Variable(1.0, trainable=False), keras.Variable(0.0, trainable=False)

    def body(i: Any) -> Any:
        count.assign_add(1.0)
        total.assign_add(count)
        return i + 1

    def run() -> Any:
        with deferring() as deferred:
            count.assign(10.0)
            tf.while_loop(lambda i: i < 3, body, [0])
            after = tf.convert_to_tensor(count)
            count.assign_add(100.0)
        return after, deferred.current(count), tf.identity(count.value)

    assert [float(value) for value in in_graph(run)] == [13.0, 113.0, 13.0]
    assert float(total.numpy()) == 11.0 + 12.0 + 13.0


def test_a_gradient_goes_to_a_variable_and_not_through_what_it_was_assigned() -> None:
    weight, state = keras.Variable(3.0), keras.Variable(2.0, trainable=False)

    def run() -> Any:
        with tf.GradientTape() as tape, deferring():
            weight.assign(weight * 2.0)
            state.assign(state * weight)
            loss = weight * weight * state
        return loss, tape.gradient(loss, weight.value)

    assert [float(value) for value in in_graph(run)] == [6.0 * 6.0 * 12.0, 2 * 6.0 * 12.0]


# Steps --------------------------------------------------------------------------------------------


# What it computes in one pass is that of one device: invariance/test_layers.py.
def test_weights_that_each_micro_batch_assigns_once_more_are_told() -> None:
    def build() -> keras.Model:
        dense = keras.layers.Dense(3, kernel_regularizer="l2")
        layers = [keras.layers.SpectralNormalization(dense), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4,)), *layers])

    run = Replicated(2, build, sgd, SQUARES, micro_batches=3)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"Write micro_batches=1"):
        run.step(BATCHES[0])


class DrawsInABranch(keras.layers.Layer):
    """Draws where nothing can be held back: a second micro-batch draws what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def call(self, x: Any, training: bool = False) -> Any:
        return tf.cond(tf.norm(x) > 0, lambda: self.dropout(x, training=training), lambda: x)


def test_what_is_drawn_in_a_branch_is_exact_or_told_with_micro_batches() -> None:
    def build() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), DrawsInABranch(), keras.layers.Dense(1)])

    hold(2, build, sgd, SQUARES, BATCHES, verify=False)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="DrawsInABranch"):
        Replicated(2, build, sgd, SQUARES, micro_batches=2).step(BATCHES[0])
