"""Everything a Keras model may hold, on several replicas: the result stays that of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, difference, plain
from problems import W, X, Y, crossentropy, mlp, network, sgd

SIZES = (7, 2, 16, 1, 5)

_random = np.random.default_rng(5)
Z = _random.normal(size=(260, 2)).astype("float32")
TOKENS = np.where(
    np.arange(4) < _random.integers(1, 5, (260, 1)), _random.integers(1, 9, (260, 4)), 0
)
TAGS = _random.integers(0, 3, (260, 4))


# Several outputs ----------------------------------------------------------------------------------


def two_heads():
    """A tagger with a masked output per token and a plain output per row."""
    tokens = keras.Input((4,), dtype="int32")
    embedded = keras.layers.Embedding(9, 5, mask_zero=True)(tokens)
    tags = keras.layers.Dense(3, name="tags")(embedded)
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    return keras.Model(tokens, [tags, keras.layers.Dense(2, name="score")(pooled)])


def score_loss(y_true, y_pred, sample_weight=None):
    return keras.losses.MeanSquaredError()(y_true[1], y_pred[1])


def test_an_output_without_a_loss_and_its_head_without_gradient():
    batches = [(t, (g, z)) for t, g, z in cut((TOKENS, TAGS, Z), SIZES)]
    expected = ByHand(two_heads, sgd, score_loss).train(batches)
    run = Replicated(3, two_heads, sgd, [None, "mse"])
    start = run.model.get_layer("tags").get_weights()
    with pytest.warns(UserWarning, match=r"No gradient reaches some .*'tags/kernel', 'tags/bias'"):
        result = run.train(batches)
    assert_same(result, expected)
    assert difference(run.model.get_layer("tags").get_weights(), start) == 0.0
    assert "tags_loss" not in result.logs[0]


def test_a_penalty_in_float16_does_not_overflow():
    """A mean times its rows must not be formed in float16: 400 * 256 is over 65504."""

    class Large(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_mean(inputs) * 0.0 + tf.constant(400.0, inputs.dtype))
            return inputs

    def build():
        large = Large(dtype="mixed_float16")
        return network(6, large, keras.layers.Dense(4))

    batch = (X[:256], Y[:256])
    logs = Replicated(2, build, sgd, crossentropy(), loss_scale=1.0).train([batch]).logs[0]
    assert 400.0 < logs["loss"] < 410.0


# How it runs --------------------------------------------------------------------------------------


def test_eager_functions():
    tf.config.run_functions_eagerly(True)
    try:
        batches = cut((X, Y, W), SIZES)
        run = Replicated(2, mlp, sgd, crossentropy(), micro_batches=2)
        result = run.train(batches)
        run.reset()
        data = tf.data.Dataset.from_tensor_slices((X[:9], Y[:9])).batch(4)
        logs = plain(run.step.run(iter(data), 5))
    finally:
        tf.config.run_functions_eagerly(False)
    assert_same(result, ByHand(mlp, sgd, crossentropy()).train(batches))
    assert logs["steps"] == 3
    assert logs["weight"] == 9


def test_switching_between_kinds_of_batches():
    """With and without sample weights, arrays of other types: each kind has a trace of its own."""
    run = Replicated(2, mlp, sgd, crossentropy())
    truth = ByHand(mlp, sgd, crossentropy())
    batches = cut((X, Y), (7, 5, 9))
    ones = [(x, y, np.ones(len(x), "float32")) for x, y in batches]
    mixed = [batches[0], ones[1], batches[2]]
    assert_same(run.train(mixed), truth.train(batches))
    doubles = [(x.astype("float64"), y.astype("int32")) for x, y in batches]
    assert_same(run.train(doubles), truth.train(batches))


# Variables ----------------------------------------------------------------------------------------


def test_layers_of_different_precision():
    def build():
        hidden = keras.layers.Dense(8, "tanh", dtype="float64")
        return network(6, hidden, keras.layers.Dense(4))

    run = Replicated(2, build, sgd, crossentropy(), clip_norm=0.1)
    start = [variable.numpy() for variable in run.model.variables]
    result = run.train([(X[:7], Y[:7])])
    assert result.logs[0]["gradient_norm"] > 0.2
    moved = [after - before for after, before in zip(result.weights, start, strict=True)]
    assert {part.dtype.name for part in moved} == {"float64", "float32"}
    length = np.sqrt(sum(np.sum(np.square(part)) for part in moved))
    assert length / 0.05 == pytest.approx(0.1, rel=1e-4), "the norm is that of all layers together"
