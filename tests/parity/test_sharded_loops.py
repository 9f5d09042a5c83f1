"""Sharded variables in loops: of micro-batches, and of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.addons.sharding import sharded_variables

layers = keras.layers
_random = np.random.default_rng(5)
# Partial batches, one row, fewer rows than replicas.
SIZES = (12, 7, 1, 2)
ROWS = sum(SIZES)
IDS = _random.integers(1, 11, (ROWS, 5)).astype("int32")
IDS[:, 3:] *= _random.integers(0, 2, (ROWS, 2)).astype("int32")
LABELS = _random.integers(0, 3, ROWS)
NUMBERS = _random.normal(size=(ROWS, 6)).astype("float32")


def batches_of(*arrays: Any) -> list[Any]:
    ends = np.cumsum(SIZES)
    return [
        tf.nest.map_structure(lambda a, end=end, size=size: a[end - size : end], arrays)
        for end, size in zip(ends, SIZES, strict=True)
    ]


def sharding() -> Any:
    """Shards on replicas; the side of one device is built outside of scopes."""
    if tf.distribute.has_strategy():
        return sharded_variables(at_least=0)
    return strategy_of(1).scope()


def recurrent(*inner: Callable[[], Any]) -> Callable[[], Any]:
    """Recurrent layers behind a mask, which Keras computes in loops."""

    def make() -> Any:
        x = inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(11, 4, mask_zero=True)(x)
        for one in inner:
            x = one()(x)
        return keras.Model(inputs, layers.Dense(3)(x))

    return make


def cells() -> Any:
    return layers.RNN([layers.LSTMCell(5, recurrent_dropout=0.2, seed=1), layers.GRUCell(4)])


MODELS = {
    "LSTM": recurrent(lambda: layers.LSTM(6, return_sequences=True), lambda: layers.LSTM(5)),
    "GRU": recurrent(lambda: layers.GRU(6)),
    "Bidirectional": recurrent(lambda: layers.Bidirectional(layers.LSTM(5))),
    "StackedRNNCells": recurrent(cells),
}


def training(make: Callable[[], Any], loss: Any = None, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        with sharding():
            model = make()
        default = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return tmg.testing.Training(model, keras.optimizers.Adam(0.01), loss or default, **options)

    return build


def hold(build: Callable[[], Any], batches: list[Any], replicas: int, **options: Any) -> None:
    tmg.testing.assert_replica_invariant(
        build, batches, strategy=strategy_of(replicas), predict=False, **options
    )


@pytest.mark.parametrize(("name", "replicas"), [("Bidirectional", 2), ("StackedRNNCells", 3)])
def test_recurrent_layers_train_as_on_one_device(name: str, replicas: int) -> None:
    hold(training(MODELS[name]), batches_of(IDS, LABELS), replicas)


def two_outputs() -> Any:
    x = inputs = keras.Input((6,))
    for _ in range(3):
        x = layers.Dense(8, "tanh")(x)
    heads = {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    return keras.Model(inputs, heads)


WEIGHED = "mean_with_sample_weight"  # Divided by sums that are known after the backward pass.
LOSSES = {
    "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=WEIGHED),
    "b": keras.losses.MeanSquaredError(reduction=WEIGHED),
}


def weighted_batches() -> list[Any]:
    y = {"a": LABELS, "b": NUMBERS[:, :1]}
    weights = {"a": np.linspace(0.1, 2.0, ROWS), "b": np.linspace(2.0, 0.0, ROWS)}
    return batches_of(NUMBERS, y, {name: w.astype("float32") for name, w in weights.items()})


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
def test_several_backward_passes(options: dict[str, Any]) -> None:
    hold(training(two_outputs, LOSSES), weighted_batches(), 3, **options)


class Reading(layers.Layer):
    """Reads a weight in a loop as few layers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(6, 6), initializer="orthogonal")
        self.bias = self.add_weight(shape=(6,), initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def scaled(y: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor, variables: Any = ()) -> Any:
                return upstream, [tf.reduce_sum(upstream * y, 0) for _ in variables]

            return y * self.bias.value, gradient

        def taped(y: tf.Tensor) -> tf.Tensor:
            y = tf.tanh(y @ self.kernel)
            with tf.GradientTape() as tape:
                energy = tf.reduce_sum(tf.stop_gradient(y[:1] * 0 + 1) @ self.kernel)
            slope = tape.gradient(energy, self.kernel.value, unconnected_gradients="zero")
            return y - 0.01 * y @ slope

        body = {
            "a custom gradient": lambda y: scaled(tf.tanh(y + self.bias)),
            "a tape": taped,
        }[self.how]
        x = x @ self.kernel + self.bias
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, body(y)), [0, x])[1]


@pytest.mark.parametrize("how", ["a custom gradient", "a tape"])
def test_weights_that_a_loop_reads_twice(how: str) -> None:
    """A tape that is opened after the first read sees the second one only."""

    def make() -> Any:
        return keras.Sequential([keras.Input((6,)), Reading(how), layers.Dense(3)])

    hold(training(make), batches_of(NUMBERS, LABELS), 2)
