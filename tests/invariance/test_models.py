"""Kinds of models: nested, subclassed, shared and frozen layers, several inputs and outputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import SIZES, Case, cut, integers, normal
from keras import layers

from tfmultigpu.addons.testing import Training

ROWS = sum(SIZES)
X = normal(ROWS, 6)
Y = integers(4, ROWS)
Z = normal(ROWS, 2, seed=1)
W = np.abs(normal(ROWS, seed=2)) + 0.1


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(model: Any) -> Training:
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return Training(model, sgd(), crossentropy(), metrics=[accuracy])


# Layers that stay, and layers that nothing asks ---------------------------------------------------


def with_a_frozen_part() -> Training:
    """A frozen submodel with statistics of its own, and a frozen layer between trained ones."""
    body = keras.Sequential(
        [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.ReLU()],
        name="body",
    )
    body.trainable = False
    middle = layers.Dense(5, "tanh", trainable=False, kernel_regularizer="l2")
    return classifier(
        keras.Sequential([keras.Input((6,)), body, layers.Dense(5), middle, layers.Dense(4)])
    )


# Models in models ---------------------------------------------------------------------------------


def shared() -> Training:
    """One layer three times, twice in a row, and one submodel on both inputs."""
    one, other = keras.Input((3,)), keras.Input((3,))
    twice = layers.Dense(3, "tanh", kernel_regularizer="l2", name="shared")
    tower = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(3)], name="tower")
    joined = layers.Concatenate()([tower(twice(twice(one))), tower(twice(other))])
    return classifier(keras.Model((one, other), layers.Dense(4)(joined)))


def functional(width: int) -> keras.Model:
    inputs = keras.Input((width,))
    hidden = layers.Dense(4, "tanh")(inputs)
    return keras.Model(inputs, layers.Add()([hidden, layers.Dense(4)(inputs)]))


class Wrapped(keras.Model):
    """A subclass around a Sequential around a Functional; training changes what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.Sequential([layers.Dense(5, "tanh"), functional(5)]), layers.Dense(4)]
        self.extra = {"bias": layers.Dense(4, use_bias=False)}

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.parts[0](x)
        more = self.extra["bias"](hidden)
        return self.parts[1](hidden + more if training else hidden)


# Several inputs and outputs -----------------------------------------------------------------------


def two_in_two_out(outputs: Any) -> keras.Model:
    numbers, wide = keras.Input((6,), name="numbers"), keras.Input((2,), name="wide")
    hidden = layers.Dense(5, "tanh")(layers.Concatenate()([numbers, wide]))
    kind, place = layers.Dense(4, name="kind")(hidden), layers.Dense(2, name="place")(hidden)
    return keras.Model({"numbers": numbers, "wide": wide}, outputs(kind, place))


def by_name() -> Training:
    return Training(
        two_in_two_out(lambda kind, place: {"kind": kind, "place": place}),
        sgd(),
        {"kind": crossentropy(), "place": "mse"},
        metrics={"kind": [keras.metrics.SparseCategoricalAccuracy()]},
        weighted_metrics={"place": [keras.metrics.MeanAbsoluteError()]},
        loss_weights={"kind": 0.3, "place": 2.0},
    )


# Layers of one's own ------------------------------------------------------------------------------


class Constants(keras.layers.Layer):
    """Holds variables that are not trained, and one that is not a float."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.power = self.add_weight(shape=(), dtype="int32", initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        return (x + self.shift) * self.scale ** tf.cast(self.power, tf.float32)


class CallCounter(keras.layers.Layer):
    """Counts its calls in training and computes with the count."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
        return x / (1.0 + 0.1 * self.calls)


class WeightAverage(keras.layers.Layer):
    """Follows its own weights by a moving average, as a momentum encoder does."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.average = self.add_weight(
            shape=(shape[-1], 4), initializer="zeros", trainable=False, name="average"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.average.assign(0.9 * self.average + 0.1 * self.kernel)
        return x @ self.kernel + tf.stop_gradient(x @ self.average)


class InputAverage(keras.layers.Layer):
    """Follows the mean of what all replicas are given."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            total, count = tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], tf.float32)
            context = tf.distribute.get_replica_context()
            if context is not None:
                total, count = context.all_reduce("SUM", [total, count])
            self.mean.assign(0.9 * self.mean + 0.1 * total / count)
        return x - self.mean


def own(*inner: Any) -> Any:
    def build() -> Training:
        return classifier(
            keras.Sequential(
                [
                    keras.Input((6,)),
                    layers.Dense(5, "tanh"),
                    *(kind() for kind in inner),
                    layers.Dense(4),
                ]
            )
        )

    return build


def subclassed(kind: type[keras.Model]) -> Any:
    return lambda: classifier(kind())


TWO = {"numbers": X, "wide": Z}

CASES = [
    Case("frozen layers", with_a_frozen_part, cut(X, Y)),
    Case("shared layers", shared, cut((X[:, :3], X[:, 3:]), Y)),
    Case("a subclass around models", subclassed(Wrapped), cut(X, Y)),
    Case(
        "inputs, outputs, losses and weights by name",
        by_name,
        cut(TWO, {"kind": Y, "place": Z}, {"kind": W, "place": W[::-1].copy()}),
        options={"micro_batches": 2, "predict": True},
    ),
    Case("layers with a state of their own", own(Constants, CallCounter, WeightAverage), cut(X, Y)),
    Case(
        "a state computed from the rows of all replicas",
        own(InputAverage),
        cut(X, Y),
    ),
]


@pytest.mark.filterwarnings("ignore:No gradient reaches some trainable variables")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()
