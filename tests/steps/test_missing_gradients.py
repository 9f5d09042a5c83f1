"""Gradients that do not exist, and regularizers that read other variables than their own."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut

import tfmultigpu as tmg

_random = np.random.default_rng(4)
X = _random.normal(size=(9, 5)).astype("float32")
Y = _random.normal(size=(9, 2)).astype("float32")
SIZES = (5, 2, 7, 1)
SQUARES = keras.losses.MeanSquaredError()


def sgd():
    return keras.optimizers.SGD(0.05)


class Stop(keras.layers.Layer):
    def call(self, inputs):
        return tf.stop_gradient(inputs)


def stopping(*, after: bool):
    def build():
        first, second = keras.layers.Dense(4, name="first"), keras.layers.Dense(2, name="second")
        layers = [first, second, Stop()] if after else [first, Stop(), second]
        return keras.Sequential([keras.Input((5,)), *layers])

    return build


def forward(model, batch, training):
    x, y = batch
    return tmg.loss_sum("mse", y, model(x, training=training))


KINDS = {
    "plain": (1, "mse", {}),
    "other parts": (2, "mse", {"micro_batches": (2, 1)}),
    "forward": (2, None, {"forward": forward}),
    "sharded": (2, "mse", {"shard_update": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_anywhere_is_an_error_as_in_keras(kind):
    replicas, loss, options = KINDS[kind]
    truth = stopping(after=True)()
    truth.compile(sgd(), "mse")
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        truth.train_on_batch(X, Y)
    run = Replicated(replicas, stopping(after=True), sgd, loss, **options)
    with pytest.raises(
        tmg.errors.LossError, match=r"No gradient reaches any.*first/kernel'"
    ) as caught:
        run.step((X, Y))
    assert isinstance(caught.value, ValueError)
    assert "tf.stop_gradient" in str(caught.value)
    assert int(run.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_for_some_variables_is_said_once(kind):
    replicas, loss, options = KINDS[kind]
    batches = cut((X, Y), SIZES)
    expected = ByHand(stopping(after=False), sgd, SQUARES).train(batches)
    run = Replicated(replicas, stopping(after=False), sgd, loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(run.train(batches), expected)
        run.step((X, Y, np.ones(9, "float32")) if loss else (X, Y))  # Traced again, for weights.
    texts = [str(one.message) for one in caught if "gradient" in str(one.message)]
    assert len(texts) == 1
    assert "first/kernel', '" in texts[0]
    assert "first/bias']" in texts[0]


def test_nothing_to_train_is_said_and_the_loss_is_that_of_keras():
    def build():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
        model.trainable = False
        return model

    run = Replicated(2, build, sgd, "mse")
    with pytest.warns(UserWarning, match="The model has no trainable variables"):
        losses = run.train(cut((X, Y), SIZES)).losses
    truth = build()
    truth.set_weights(run.model.get_weights())
    truth.compile(sgd(), "mse")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        expected = [float(truth.train_on_batch(*batch)) for batch in cut((X, Y), SIZES)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert int(run.optimizer.iterations.numpy()) == int(truth.optimizer.iterations.numpy()) == 0


# Regularizers -------------------------------------------------------------------------------------


def reading(*, frozen: bool):
    """Three layers whose regularizers read each other's variables, in every way one reads them."""

    def build():
        a, b, c = (keras.layers.Dense(4, "tanh", name=name) for name in "abc")
        model = keras.Sequential([keras.Input((5,)), a, b, c, keras.layers.Dense(2)])
        a.kernel.regularizer = lambda own: (
            tf.reduce_sum(own * own) * tf.reduce_sum(tf.square(b.kernel.value)) * 0.05
        )
        b.bias.regularizer = lambda own: keras.ops.sum(keras.ops.abs(c.kernel)) * 0.05
        c.kernel.regularizer = keras.regularizers.L2(0.02)
        b.trainable = not frozen
        return model

    return build


@pytest.mark.parametrize(
    ("replicas", "options", "frozen"),
    [(3, {"micro_batches": 2}, True), (2, {"shard_update": True, "clip_norm": 0.1}, False)],
)
def test_a_regularizer_that_reads_other_variables(replicas, options, frozen):
    batches = cut((X, Y), SIZES)
    clip_norm = options.get("clip_norm")
    build = reading(frozen=frozen)
    expected = ByHand(build, sgd, SQUARES, clip_norm=clip_norm).train(batches)
    assert_same(Replicated(replicas, build, sgd, SQUARES, **options).train(batches), expected)


def test_a_regularizer_of_keras_reads_its_own_variable_alone():
    """No operation for the others: the usual case costs what it did."""

    def build():
        regularized = keras.layers.Dense(4, kernel_regularizer="l2", name="a")
        return keras.Sequential([keras.Input((5,)), regularized, keras.layers.Dense(2)])

    from tfmultigpu.losses.objective import regularization

    model = build()
    traced = tf.function(lambda: regularization(model.trainable_variables)[0])
    operations = traced.get_concrete_function().graph.get_operations()
    assert [op.type for op in operations].count("ReadVariableOp") == 1


def test_a_regularizer_with_a_count_of_its_own():
    def build():
        class Annealed(keras.regularizers.Regularizer):
            def __init__(self):
                self.calls = keras.Variable(0.0, trainable=False)

            def __call__(self, own):
                self.calls.assign_add(1.0)
                return tf.reduce_sum(own * own) / self.calls.value

        regularizer = Annealed()
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(2, kernel_regularizer=regularizer)]
        )
        model.counts = regularizer.calls
        return model

    run = Replicated(1, build, sgd, "mse")
    for calls in (1.0, 2.0):
        weights = run.model.layers[0].get_weights()[0]
        loss = float(run.step((X, Y))["loss"])
        assert run.model.counts.numpy() == calls
        assert loss > (weights**2).sum() / calls - 1e-6
