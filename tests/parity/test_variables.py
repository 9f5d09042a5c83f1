"""Variables of every kind and the optimizers that update them, on several replicas."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from one_device import ByHand, Replicated, assert_same, cut, hold

SIZES = (7, 2, 16, 1, 5)

_random = np.random.default_rng(5)
X = _random.normal(size=(32, 6)).astype("float32")
Y = _random.integers(0, 4, 32)
Z = _random.normal(size=(32, 2)).astype("float32")
BATCHES = cut((X, Y), SIZES)


def sgd(**options: object) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def crossentropy(**options: object) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def test_an_unbuilt_sequential_model_is_built_by_its_first_batch():
    def build():
        return keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])

    hold(3, build, sgd, crossentropy(), BATCHES)


def test_an_unbuilt_subclassed_model_with_a_dict_of_inputs():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras.layers.Dense(8, activation="tanh")
            self.second = keras.layers.Dense(4)

        def call(self, inputs, training=False):
            return self.second(self.first(inputs["x"]) * inputs["z"][:, :1])

    batches = [({"x": x, "z": z}, y) for x, z, y in cut((X, Z, Y), SIZES)]
    expected = ByHand(Model, sgd, crossentropy()).train(batches)
    assert_same(Replicated(3, Model, sgd, crossentropy()).train(batches), expected)


def test_layers_of_different_precision():
    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", dtype="float64"),
                keras.layers.Dense(4),
            ]
        )

    run = Replicated(2, build, sgd, crossentropy(), clip_norm=0.1)
    start = [variable.numpy() for variable in run.model.variables]
    result = run.train(BATCHES[:1])
    assert result.logs[0]["gradient_norm"] > 0.2
    moved = [after - before for after, before in zip(result.weights, start, strict=True)]
    assert {part.dtype.name for part in moved} == {"float64", "float32"}
    length = np.sqrt(sum(np.sum(np.square(part)) for part in moved))
    assert length / 0.05 == pytest.approx(0.1, rel=1e-4), "the norm is that of all layers together"
