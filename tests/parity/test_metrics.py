"""Metrics that a step refuses; those it takes are in tests/promises/test_eval_predict_steps.py."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(13)
X = _random.normal(size=(32, 6)).astype("float32")
Y = _random.integers(0, 3, 32)


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])


def still() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.0)


def two_heads() -> keras.Model:
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(3, "softmax", name="kind")(inputs)
    size = keras.layers.Dense(1, name="size")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": size})


def refused(metrics, **options):
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = classifier(), still()
    return tmg.make_train_step(
        model, optimizer, "sparse_categorical_crossentropy", strategy, metrics=metrics, **options
    )


def test_a_name_is_no_metric():
    with pytest.raises(tmg.errors.LossError, match=r"update_state.*Received: 'accuracy'"):
        refused(["accuracy"])


def test_a_mean_of_values_is_no_metric_of_a_step_nor_are_metrics_beside_forward():
    with strategy_of(2).scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        model, optimizer = classifier(), still()
    with pytest.raises(tmg.errors.LossError, match="Received: <Mean name=mean>"):
        refused([mean])
    with pytest.raises(tmg.errors.LossError, match="With forward the step sees no labels"):
        tmg.make_train_step(
            model, optimizer, None, strategy_of(2), forward=lambda m, b, t: b, metrics=[accuracy]
        )


def test_a_metric_whose_state_is_no_sum():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value", aggregation="mean")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

        def result(self):
            return self.value

    with strategy_of(2).scope():
        largest = Largest()
    step = refused([largest])
    with pytest.warns(tmg.ReplicaDependenceWarning, match="largest/value"):
        step((X, Y))


def test_metrics_that_do_not_say_for_which_output():
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = two_heads(), still()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    losses = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    step = tmg.make_train_step(model, optimizer, losses, strategy, metrics=[accuracy])
    with pytest.raises(
        tmg.errors.LossError, match=r"2 outputs.* the metrics do not fit.*a dict by name"
    ):
        step((X, {"kind": Y, "size": X[:, :1]}))
