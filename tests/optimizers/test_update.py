"""What an update waits for, and how often it reads what all variables share."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(37)
X = _random.normal(size=(12, 6)).astype("float32")
Y = _random.normal(size=(12, 1)).astype("float32")


@keras.saving.register_keras_serializable("test_updates")
class FailsBackward(keras.layers.Layer):
    """Passes its input on; its gradient fails where a label says so, by a check or by Python."""

    def __init__(self, by_python: bool, **options: object) -> None:
        super().__init__(**options)
        self.by_python = by_python

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        by_python = self.by_python

        @tf.custom_gradient
        def same(x: tf.Tensor):
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                if by_python:
                    checked = tf.py_function(_checked, [upstream], tf.float32)
                else:
                    checked = tf.debugging.check_numerics(upstream, "not finite on the way back")
                return tf.ensure_shape(checked, upstream.shape)

            return tf.identity(x), backward

        return same(inputs)


def _checked(tensor: tf.Tensor) -> tf.Tensor:
    if not np.isfinite(tensor.numpy()).all():
        raise FloatingPointError("not finite on the way back")
    return tensor


@pytest.mark.parametrize(
    ("replicas", "by_python", "options"),
    [
        (1, True, {}),
        (2, False, {"shard_update": True}),
        (2, False, {"micro_batches": 2}),
    ],
)
def test_a_backward_pass_that_fails_updates_nothing(replicas, by_python, options):
    """Its last layers are through when the first one fails, and could be updated by then."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "tanh"), FailsBackward(by_python)]
        layers += [keras.layers.Dense(8, "tanh") for _ in range(6)]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, **options)
    step((X, Y))
    before = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    bad = Y.copy()
    bad[-1] = np.inf
    for _ in range(5):
        with pytest.raises((tf.errors.OpError, FloatingPointError), match="on the way back"):
            step((X, bad))
    after = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    step((X, Y))
    assert int(optimizer.iterations.numpy()) == 2


class Determinant(keras.layers.Layer):
    """Appends a determinant, whose gradient does not exist where it is 0."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        matrices = tf.reshape(inputs[:, :4], [-1, 2, 2])
        return tf.concat([inputs, tf.linalg.det(matrices)[:, None]], axis=1)


def doubled_if_alone(inputs: tf.Tensor) -> tf.Tensor:
    """Makes two rows of a single one, which then has two losses."""
    alone = tf.cast(tf.equal(tf.shape(inputs)[0], 1), tf.int32)
    return tf.ensure_shape(tf.tile(inputs, [1 + alone, 1]), [None, 1])


def inverse(kernel: tf.Tensor) -> tf.Tensor:
    """Fails for a kernel of zeros, not at once but on the way back."""
    return 1e-6 * tf.linalg.det(kernel[:4, :4])


@pytest.mark.parametrize("fails", ["layer", "regularizer", "check of rows"])
def test_operations_that_fail_by_what_they_are_given_update_nothing(fails):
    first = keras.layers.Dense(
        6, use_bias=False, kernel_regularizer=inverse if fails == "regularizer" else None
    )
    layers = [first]
    if fails == "layer":
        layers += [Determinant()]
    layers += [keras.layers.Dense(8, "tanh") for _ in range(6)] + [keras.layers.Dense(1)]
    if fails == "check of rows":
        layers += [keras.layers.Lambda(doubled_if_alone)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, "mse")
    step((X, Y))
    x = X.copy()
    if fails == "layer":
        x[3] = 0
    elif fails == "regularizer":
        first.kernel.assign(tf.zeros([6, 6]))
    before = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    rows = 1 if fails == "check of rows" else 12
    error = tmg.LossError if fails == "check of rows" else tf.errors.InvalidArgumentError
    text = "one value per row" if fails == "check of rows" else "not invertible"
    for _ in range(3):
        with pytest.raises(error, match=text):
            step((x[:rows], Y[:rows]))
    after = [v.numpy() for v in (*model.variables, *optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule with a state of its own, which asking it advances."""

    def __init__(self) -> None:
        self.rate = keras.Variable(1.0)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        self.rate.assign(self.rate * 0.5)
        return tf.convert_to_tensor(self.rate)


def test_a_learning_rate_with_a_state_is_asked_once_per_update():
    for as_function in (False, True):
        weight, rate = keras.Variable([1.0]), Halving()
        optimizer = keras.optimizers.SGD((lambda rate=rate: rate(None)) if as_function else rate)
        optimizer.build([weight])
        for _ in range(2):
            tmg.apply_reduced_gradients(optimizer, [tf.constant([0.5])], [weight])
        assert float(rate.rate.numpy()) == 0.25
        assert float(weight.numpy()[0]) == 1.0 - 0.5 * (0.5 + 0.25)
