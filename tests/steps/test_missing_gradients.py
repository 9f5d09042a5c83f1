"""Gradients that do not exist, and regularizers that read other variables than their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut

import tfmultigpu as tmg

_random = np.random.default_rng(4)
X = _random.normal(size=(9, 5)).astype("float32")
Y = _random.normal(size=(9, 2)).astype("float32")
BATCHES = cut((X, Y), (5, 2, 7, 1))
SQUARES = keras.losses.MeanSquaredError()


def sgd() -> Any:
    return keras.optimizers.SGD(0.05)


class Stop(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return tf.stop_gradient(inputs)


def stopping(*, after: bool) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        first, second = keras.layers.Dense(4, name="first"), keras.layers.Dense(2, name="second")
        layers = [first, second, Stop()] if after else [first, Stop(), second]
        return keras.Sequential([keras.Input((5,)), *layers])

    return build


def forward(model: Any, batch: Any, training: bool) -> Any:
    return tmg.loss_sum("mse", batch[1], model(batch[0], training=training))


KINDS = {
    "parts": (2, "mse", {"micro_batches": 2}),
    "forward": (1, None, {"forward": forward}),
    "owners": (2, "mse", {"shard_update": True}),
}


# Fails if a step without any gradient is counted, or one for some variables is not told.
@pytest.mark.parametrize("kind", KINDS)
def test_missing_gradients_are_told(kind: str) -> None:
    replicas, loss, options = KINDS[kind]
    run = Replicated(replicas, stopping(after=True), sgd, loss, **options)
    with pytest.raises(tmg.errors.LossError, match=r"No gradient reaches any.*first/kernel'.*tf\."):
        run.step((X, Y))
    assert int(run.optimizer.iterations.numpy()) == 0
    expected = ByHand(stopping(after=False), sgd, SQUARES).train(BATCHES)
    run = Replicated(replicas, stopping(after=False), sgd, loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(run.train(BATCHES), expected)
        run.step((X, Y, np.ones(9, "float32")) if loss else (X, Y))  # Traced again, for weights.
    (text,) = {str(one.message) for one in caught}
    assert "first/kernel', '" in text
    assert "first/bias']" in text


def test_nothing_to_train_is_said_and_the_loss_is_that_of_keras() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.trainable = False
        return model

    run = Replicated(2, build, sgd, "mse")
    with pytest.warns(UserWarning, match="The model has no trainable variables"):
        losses = run.train(BATCHES).losses
    truth = build()
    truth.set_weights(run.model.get_weights())
    truth.compile(sgd(), "mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        expected = [float(truth.train_on_batch(*batch)) for batch in BATCHES]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert int(run.optimizer.iterations.numpy()) == int(truth.optimizer.iterations.numpy()) == 0


def test_a_regularizer_with_a_count_of_its_own() -> None:
    class Annealed(keras.regularizers.Regularizer):
        def __init__(self) -> None:
            self.calls = keras.Variable(0.0, trainable=False)

        def __call__(self, own: Any) -> Any:
            self.calls.assign_add(1.0)
            return tf.reduce_sum(own * own) / self.calls.value

    def build() -> keras.Model:
        regularizer = Annealed()
        layer = keras.layers.Dense(2, kernel_regularizer=regularizer)
        model = keras.Sequential([keras.Input((5,)), layer])
        model.counts = regularizer.calls
        return model

    run = Replicated(1, build, sgd, "mse")
    for calls in (1.0, 2.0):
        weights = run.model.layers[0].get_weights()[0]
        loss = float(run.step((X, Y))["loss"])
        assert run.model.counts.numpy() == calls
        assert loss > (weights**2).sum() / calls - 1e-6
