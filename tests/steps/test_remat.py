"""Each kind of layer that a second call changes, rematerialized, against plain Keras without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Training, cut
from law.pair import Pair
from one_device import strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.steps.features.remat import CallOnce, Recompute

layers = keras.layers
SIZES = (5, 3, 4)
_random = np.random.default_rng(31)
X, Y = _random.normal(size=(sum(SIZES), 3, 4)), _random.normal(size=(sum(SIZES), 2))


class Model(keras.Model):
    """Layers in a function that is wrapped, and a dense layer before and after it."""

    def __init__(self, wrap: Any, parts: Sequence[Any], call: Any) -> None:
        super().__init__()
        self.wrap, self.parts, self.function = wrap, list(parts), call
        self.before, self.after = layers.Dense(4), layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.function(self.parts, self.before(x), self.wrap, training)
        return self.after(x)[:, -1]


def plain(parts: Any, x: Any, wrap: Any, training: bool) -> Any:
    """The layers, one after the other, and the square of what they give."""

    def function(x: Any) -> Any:
        for part in parts:
            x = part(x, training=training) if part._call_has_training_arg else part(x)
        return tf.square(x)

    return wrap(function)(x)


def twice(parts: Any, x: Any, wrap: Any, training: bool) -> Any:
    """A layer that reads in a branch what its last call has assigned."""
    wrapped = wrap(functools.partial(parts[0], training=training))
    return wrapped(wrapped(x))


def whole(parts: Any, x: Any, wrap: Any, training: bool) -> Any:
    """The layer itself is wrapped, and what it adds or masks must come out."""
    return parts[-1](wrap(parts[0])(x, training=training))


def of_ids(parts: Any, x: Any, wrap: Any, training: bool) -> Any:
    """No argument has a gradient, and what comes out has a mask."""
    ids = tf.argmax(x, -1)
    return parts[1](wrap(parts[0])(ids))[:, None] + x


def nothing_given(parts: Any, x: Any, wrap: Any, training: bool) -> Any:
    """A function of no tensor gives a structure with things that are none."""
    kernel, bias = parts[0].kernel, parts[0].bias
    found = wrap(lambda number, flag: {"kernel": kernel * number + bias, "flag": flag})
    return x @ found(2.0, flag=None)["kernel"]


def penalised(parts: Any, x: Any, wrap: Any, training: bool) -> Any:
    """The gradient of a gradient, as a penalty has it."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = plain(parts, x, wrap, training)
    return result * tf.reduce_mean(tf.square(tape.gradient(result, x)))


class Built(layers.Dense):
    """A dense layer: ``call_has_training_arg`` is false."""


KINDS: dict[str, tuple[int, Callable[[], Sequence[Any]], Any]] = {
    "noise": (2, lambda: [layers.GaussianNoise(0.5, seed=1), layers.AlphaDropout(0.3)], plain),
    "plain batch norm": (1, lambda: [layers.BatchNormalization()], plain),
    "spectral, twice": (2, lambda: [layers.SpectralNormalization(layers.Dense(4))], twice),
    "activity": (3, lambda: [layers.Dense(4, activity_regularizer="l2"), Built(4)], whole),
    "lstm": (2, lambda: [layers.LSTM(4, dropout=0.3, return_sequences=True), Built(4)], whole),
    "ids": (2, lambda: [layers.Embedding(4, 4, mask_zero=True), layers.LSTM(4)], of_ids),
    "nothing given": (2, lambda: [built_dense()], nothing_given),
    "penalty": (1, lambda: [layers.Dense(4, "tanh"), layers.Dropout(0.3, seed=2)], penalised),
}


def built_dense() -> Any:
    layer = layers.Dense(4)
    layer.build((None, 4))
    return layer


def build(wraps: Any, parts: Any, function: Any) -> Training:
    model = Model(lambda function: function, parts(), function)
    model(np.zeros((1, 3, 4)))  # Outside of a graph TensorFlow's own function takes less.
    model.wrap = next(wraps)
    return Training(model, keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())


# Fails if a kind of layer is repeated otherwise than it was computed.
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_what_it_trains_without(kind: str, precision: str) -> None:
    replicas, parts, function = KINDS[kind]
    if precision == "float32" and kind not in ("noise", "penalty"):
        pytest.skip("float64 says more")
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(precision)
    keras.config.set_dtype_policy(precision)
    try:
        keras.backend.clear_session()
        wraps = iter([lambda function: function, keras.remat])
        batches = cut((X.astype(precision), Y.astype(precision)), SIZES)
        both = functools.partial(build, wraps, parts, function)
        pair = Pair(both, batches[0], replicas, verify=False)
        pair.plain.train(batches)
        for shards in pair.shards(batches):
            pair.step(shards)
        tolerance = 1e-11 if precision == "float64" else 1e-5
        pair.assert_same(rtol=tolerance, atol=tolerance)
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


class Cells(keras.Model):
    """A loop in Python over a cell, which keeps the mask of its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.after = layers.LSTMCell(4, dropout=0.5), layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        self.cell.reset_dropout_mask()
        states = [tf.zeros_like(x[:, 0]), tf.zeros_like(x[:, 0])]
        for place in range(3):
            _, states = keras.remat(self.cell)(x[:, place], states, training=training)
        return self.after(states[0])


# Fails if the cell of an RNN layer trains with another mask without a word.
def test_a_cell_that_keeps_its_mask_is_an_error() -> None:
    step = tmg.make_train_step(Cells(), keras.optimizers.SGD(0.1), "mse", strategy_of(1))
    with pytest.raises(tmg.TfMultiGpuError, match="draws") as error:
        step((X.astype("float32"), Y.astype("float32")))
    assert "keras.remat(layer)(x)" in str(error.value)


# Fails if a step has no part that handles rematerialization.
def test_every_step_handles_it() -> None:
    model = network(4, layers.Dense(2))
    one = strategy_of(1)  # As strategies of other tests may live.
    train = tmg.make_train_step(model, keras.optimizers.SGD(0.1), "mse", one)
    assert any(isinstance(feature, Recompute) for feature in train.features)
    for step in (tmg.make_eval_step(model, "mse", one), tmg.make_predict_step(model, one)):
        assert any(isinstance(feature, CallOnce) for feature in step.features)
