"""Losses that layers add and penalties, losses of ``forward``, variables that no loss reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from law.model import Training
from problems import network, networks, normal_rows, sgd

import tfmultigpu as tmg
from cases.case import Case, model

L = keras.layers
X, Y = normal_rows(9, 5, 2, seed=4)
BATCHES = [*model.cut((X, Y), (5, 2)), (X[:7], Y[:7]), (X[7:8], Y[7:8])]
SQUARES = keras.losses.MeanSquaredError()


def squares(build: Callable[[], Any]) -> Callable[[], Training]:
    return lambda: Training(build(), sgd(), SQUARES)


class Idle(L.Layer):
    """Has a variable that its penalty alone moves."""

    def build(self, _: Any) -> None:
        self.idle = self.add_weight(shape=(3,), initializer="ones", regularizer="l2")

    def call(self, inputs: Any) -> Any:
        return inputs


# What layers add: means over the rows, or one value per row, as Keras counts them ----------------

ADDED: dict[str, Callable[[Any], Any]] = {
    "a mean": lambda x: tf.reduce_mean(x * x),
    "one value per row": lambda x: 0.1 * tf.reduce_mean(x * x, axis=-1),
    "one value per row, with an axis": lambda x: 0.1 * tf.reduce_mean(x * x, -1, keepdims=True),
    "a mean for each unit": lambda x: tf.reduce_mean(x * x, axis=0),
    "no rows at all": lambda x: tf.constant(3.0),
}


class Add(L.Layer):
    """Adds a loss of what it is given."""

    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.function(inputs))
        return inputs


def adding(*functions: Any, dtype: str = "float32") -> Callable[[], keras.Model]:
    """A block with dropout and a layer that adds a loss for each of the functions."""

    def build() -> keras.Model:
        layers: list[Any] = [keras.Input((5,), dtype=dtype)]
        for i, function in enumerate(functions):
            layers += [L.Dense(4, "tanh", dtype=dtype), L.Dropout(0.5, seed=i, dtype=dtype)]
            layers += [Add(function, dtype=dtype)]
        return keras.Sequential([*layers, L.Dense(2, dtype=dtype)])

    return build


def adding_every_kind() -> Training:
    """The weights of each block tell which kind is wrong."""
    built = adding(*ADDED.values(), dtype="float64")()
    return Training(built, sgd(), keras.losses.MeanSquaredError(dtype="float64"))


def sum_of_squares(x: Any) -> Any:
    """A loss that is no mean: on one replica, in one piece, what Keras makes of it."""
    return 0.1 * tf.reduce_sum(x * x)


def sparse_and_adding(**more: Any) -> Training:
    model = network(5, L.Dense(2), Add(ADDED["a mean"]), sparse=True)
    return Training(model, sgd(), SQUARES, **more)


def of_a_forward() -> Training:
    """A forward that calls each layer, and another model, whose losses do not count."""
    critic = network(2, Add(ADDED["a mean"]))

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        dense, add = model.layers
        critic(y)
        return tmg.loss_sum("mse", y, add(dense(x)))

    def whole(model: Any, batch: Any) -> Any:
        x, y = batch
        return SQUARES(y, model(x, training=True))

    return dataclasses.replace(sparse_and_adding(), loss=None, forward=forward, whole=whole)


# Losses of forward --------------------------------------------------------------------------------


class Both(keras.Model):
    """Two models as one, for a forward that calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = network(4, keras.layers.Dense(3))
        self.decoder = network(3, keras.layers.Dense(4))
        self.size = keras.metrics.Mean()
        self.built = True


def forward(both: Any, batch: Any, training: bool) -> Any:
    code = both.encoder(batch, training=training)
    error = tmg.loss_sum("mse", batch, both.decoder(code, training=training))
    size = tf.reduce_sum(code**2, -1)
    both.size.update_state(size)
    return tmg.LossSum(error.sum + tf.reduce_sum(size), error.weight)


def of_two_models() -> Training:
    def whole(both: Any, batch: Any) -> Any:
        code = both.encoder(batch)
        size = tf.reduce_sum(code**2, -1)
        both.size.update_state(size)
        return tf.reduce_mean((batch - both.decoder(code)) ** 2) + tf.reduce_mean(size)

    return Training(Both(), sgd(), None, forward=forward, whole=whole)


SIZES = (5, 1, 3, 7)
(ROWS,) = normal_rows(sum(SIZES), 4, seed=4)
PARTS = model.cut(ROWS, SIZES)
IDLE = squares(networks(5, Idle, lambda: L.Dense(2)))
CASES = [
    Case("a penalty on what no loss reaches", IDLE, BATCHES),
    Case("a penalty on what no loss reaches, owned", IDLE, BATCHES, {"shard_update": True}),
    Case(
        "what layers add, in float64",
        adding_every_kind,
        [(x.astype("float64"), y.astype("float64")) for x, y in BATCHES],
        {"micro_batches": 2},
        replicas=(3,),
        bound=1e-13,
    ),
    Case(
        "a layer adds a sum: on one replica what Keras makes of it",
        squares(adding(lambda x: 0.1 * tf.reduce_sum(x * x))),
        BATCHES,
        replicas=(1,),
    ),
    Case(
        "a layer adds a loss of sparse rows",
        sparse_and_adding,
        [(tf.sparse.from_dense(x), y) for x, y in BATCHES],
        replicas=(3,),
    ),
    Case("layers called by a forward add losses", of_a_forward, BATCHES, replicas=(3,)),
    Case("a forward of two models, by XLA", of_two_models, PARTS, {"jit_compile": True}),
    Case("a forward of two models", of_two_models, PARTS, {"micro_batches": 2}, replicas=(3,)),
]
