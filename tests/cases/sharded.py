"""Sharded variables: settings of the optimizer, and layers that read weights in unusual places.

Several outputs, micro-batches and all features together: tests/promises/test_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from law.model import Training
from one_device import cut
from problems import crossentropy, labelled, network

from cases.case import EACH_ALONE, Case

_random = np.random.default_rng(3)
NUMBERS = _random.normal(size=(12, 4)).astype("float32")
IDS = _random.integers(1, 11, (12, 5)).astype("int32")
X, Y, _ = labelled(12, 6, 3, seed=3)


def mlp() -> keras.Model:
    limit = keras.constraints.MaxNorm(1.0)
    hidden = [
        layers.Dense(16, "tanh", kernel_regularizer="l2"),
        layers.Dropout(0.3, seed=1),
        layers.Dense(16, "tanh", kernel_constraint=limit),
    ]
    return network(6, *hidden, layers.Dense(3))


def under_adam() -> Training:
    """An optimizer that is built before the step, whose settings act on each variable."""
    model = mlp()
    averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    adam = keras.optimizers.Adam(0.01, clipnorm=0.1, weight_decay=0.1, **averages)
    adam.build(model.trainable_variables)
    return Training(model, adam, crossentropy())


def gru() -> Any:
    ids = keras.Input((5,), dtype="int32")
    return keras.Model(ids, layers.Dense(4)(layers.GRU(6)(layers.Embedding(11, 4)(ids))))


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
    return keras.Model(inputs, layers.BatchNormalization(synchronized=True, epsilon=0.1)(x))


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
    return network(4, ReadInALoop(taped), layers.Dense(4))


def reading(name: str, build: Callable[[], Any], x: Any = NUMBERS) -> Case:
    """A read that waits for itself would hang."""

    def make() -> Training:
        sgd = keras.optimizers.SGD(0.01, momentum=0.9)
        return Training(build(), sgd, keras.losses.MeanSquaredError())

    batches = cut((x, np.ones((12, 4), "float32")), (7, 2, 12))
    return Case(name, make, batches, {"verify": False}, replicas=(3,), sharded=EACH_ALONE)


CASES = [
    Case(
        "settings of the optimizer",
        under_adam,
        cut((X, Y), (7, 1, 12)),
        {"verify": False},
        replicas=(3,),
        sharded=EACH_ALONE,
    ),
    reading("a custom gradient in a loop", lambda: in_a_loop(False)),
    reading("a tape in a loop", lambda: in_a_loop(True)),
    reading("two weights in one operation", lambda: network(4, TwoInOne(), layers.Dense(4))),
    reading("a layer that is used twice", used_twice),
    reading("a recurrent layer", gru, IDS),
]
