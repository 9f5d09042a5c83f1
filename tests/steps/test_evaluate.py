"""Evaluation and prediction in functions of the user, and predictions that make no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg

SIZES = (7, 2, 16, 1, 3, 9)
_random = np.random.default_rng(23)
X = _random.normal(size=(sum(SIZES), 6)).astype("float32")
Y = _random.integers(0, 3, len(X))


def classifier() -> keras.Model:
    layers = [
        keras.layers.Dense(5, kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3, activation="softmax"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def made(replicas: int, build: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """The same model on one device and under a strategy."""
    keras.utils.set_random_seed(3)
    truth = build()
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = build()
    model.set_weights(truth.get_weights())
    return strategy, model, truth


def test_predicting_inside_a_function_of_the_user_and_by_shares() -> None:
    strategy, model, truth = made(3, classifier)
    step = tmg.make_predict_step(model, strategy)

    @tf.function
    def classes(iterator: Any) -> Any:
        return tf.argmax(step(next(iterator)), axis=-1)

    # Labels beside the features are left alone.
    data = tmg.distribute_dataset(as_dataset(cut((X, Y), SIZES)), strategy, shares=(1, 2, 3))
    iterator = iter(data)
    found = np.concatenate([classes(iterator) for _ in SIZES])
    np.testing.assert_array_equal(found, np.argmax(truth(X, training=False), axis=-1))


class UpToLongest(keras.layers.Layer):
    """Cuts rows to the largest number in the batch."""

    def call(self, x: Any) -> Any:
        return x[:, : tf.cast(tf.reduce_max(x), tf.int32)]


class Output(keras.Model):
    """Makes an output of a kind that layers of Keras do not make."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def test_outputs_that_make_one_tensor_and_those_that_do_not() -> None:
    x = np.full((5, 4), 2.0, "float32")
    x[4] = 3

    def predict(model: Callable[[], Any], x: Any) -> Any:
        with strategy_of(2).scope():
            step = tmg.make_predict_step(model(), strategy_of(2), verify=False)
        return step(x)

    def up_to_longest() -> keras.Model:
        inputs = keras.Input((4,))
        return keras.Model(inputs, UpToLongest()(inputs))

    assert predict(up_to_longest, x[:4]).shape == (4, 2)
    rows = [[1.0] * n for n in (1, 3, 0, 2, 1)]
    ragged = tf.ragged.constant(rows, ragged_rank=1)
    assert predict(lambda: Output(lambda x: [x, None]), ragged)[0].to_list() == rows
    with pytest.raises(tf.errors.InvalidArgumentError, match="Dimension 1 in both shapes"):
        predict(up_to_longest, x)
