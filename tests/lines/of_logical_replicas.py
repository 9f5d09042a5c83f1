"""Logical replicas: what fits them, what meets, and what belongs to no row."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from lines.messages import Told, example
from lines.parts import X, Y, distribute, made, optimizer_of, step, strategy_of


def centered(model: Any, batch: Any, training: bool) -> tmg.LossSum:
    """Returns a loss of outputs without the mean over the rows that it can gather."""
    outputs = model(batch[0], training=training)
    return tmg.loss_sum("mse", batch[1], outputs - tf.reduce_mean(tmg.gather_rows(outputs), 0))


class Counts(keras.layers.Layer):
    """Counts rows in a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rows = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="float32", **options
        )

    def call(self, x: Any) -> Any:
        self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


class Largest(keras.metrics.Metric):
    """Keeps the largest value; or its sum, which can be added."""

    def __init__(self, *, adds: bool = False) -> None:
        super().__init__(name="largest")
        self.value, self.adds = self.add_variable((), "zeros"), adds

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        if self.adds:
            self.value.assign_add(tf.reduce_sum(outputs))
        else:
            self.value.assign(tf.maximum(self.value, tf.reduce_max(outputs)))

    def result(self) -> Any:
        return self.value


def with_layer(layer: Any, build_in: int = 2) -> Any:
    return made(lambda: network(4, layer(), keras.layers.Dense(2)), build_in)


@example("Logical replicas are added in pairs, so each device computes 1, 2, 4, 8 ... of them, or")
def three_on_two(told: Told) -> None:
    with told(tmg.TfMultiGpuError, "logical_replicas=3 on 2 replica.*Take one of 1, 3 replicas"):
        step(logical_replicas=3)
    step(logical_replicas=4)((X, Y))


@example("Logical replicas have rows of the global batch by their numbers, and the shards of this")
def other_shares(told: Told) -> None:
    trained, data = step(logical_replicas=2), distribute((X, Y), batch_size=8, shares=(3, 1))
    with told(tmg.errors.DataError, "shards that begin at rows 0, 6"):
        trained(next(iter(data)))
    trained(next(iter(distribute((X, Y), batch_size=8))))


@example("All logical replicas are calls of one function, and here that is not possible: {}")
def what_meets(told: Told) -> None:
    synchronized = lambda: keras.layers.BatchNormalization(synchronized=True)  # noqa: E731
    with told(tmg.TfMultiGpuError, "logical_replicas=4 on 2 .*plain BatchNormalization"):
        step(with_layer(synchronized), logical_replicas=4)((X, Y))
    step(with_layer(keras.layers.BatchNormalization), logical_replicas=4)((X, Y))


@example("gather_rows would see the rows of one logical replica only: one device computes them")
def gathered_on_one_device(told: Told) -> None:
    options: Any = {"strategy": strategy_of(1), "verify": False, "forward": centered}
    options["loss"] = None
    model, optimizer = made(replicas=1), optimizer_of(1)
    with told(tmg.errors.LossError, "as many replicas as logical replicas"):
        tmg.make_train_step(model, optimizer, logical_replicas=2, **options)((X, Y))
    for logical in (None, 1):  # Of one logical replica all rows are there.
        tmg.make_train_step(model, optimizer, logical_replicas=logical, **options)((X, Y))
    step(loss=None, forward=centered, logical_replicas=2)((X, Y))


@example("Logical replicas add to the state of a metric, and this one is assigned another value")
def the_largest(told: Told) -> None:
    for adds in (False, True):
        with strategy_of(2).scope():
            metric = Largest(adds=adds)
        trained = step(metrics=[metric], logical_replicas=2)
        if adds:
            trained((X, Y))
            continue
        with told(tmg.TfMultiGpuError, "largest"):
            trained((X, Y))


@example("A weight whose values are added over the replicas would be added for each logical")
def rows_counted_in_a_weight(told: Told) -> None:
    with told(tmg.TfMultiGpuError, "aggregation='sum'"):
        step(with_layer(lambda: Counts(aggregation="sum")), logical_replicas=2)((X, Y))
    model = with_layer(Counts)
    step(model, logical_replicas=2)((X, Y))
    assert np.asarray(model.layers[0].rows.numpy()) == len(X) / 2


class Sign(keras.layers.Layer):
    """Keeps whether the sum of its rows is positive."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.sign = self.add_weight(shape=(), dtype=dtype, initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.sign.assign(tf.cast(tf.reduce_sum(x) > 0.0, self.sign.dtype))
        return x * 1.0


@example("A state of whole numbers or truth values is another one on each logical replica")
def a_sign_of_rows(told: Told) -> None:
    x = np.concatenate([X[:4], -X[:4]])
    with told(tmg.TfMultiGpuError, "the dtype float32"):
        step(with_layer(lambda: Sign("bool")), logical_replicas=4)((x, Y))
    step(with_layer(lambda: Sign("float32")), logical_replicas=4)((x, Y))
