"""Losses that layers add: means over the rows of a shard, or one value per row, as Keras counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut

import tfmultigpu as tmg

_random = np.random.default_rng(5)
X = _random.normal(size=(9, 5)).astype("float32")
Y = _random.normal(size=(9, 2)).astype("float32")
BATCHES = cut((X, Y), (5, 2, 7, 1, 3))
SQUARES = keras.losses.MeanSquaredError()
ADDED: dict[str, Callable[[Any], Any]] = {
    "a mean": lambda x: tf.reduce_mean(x * x),
    "one value per row": lambda x: 0.1 * tf.reduce_mean(x * x, axis=-1),
    "one value per row, with an axis": lambda x: 0.1 * tf.reduce_mean(x * x, -1, keepdims=True),
    "a mean for each unit": lambda x: tf.reduce_mean(x * x, axis=0),
    "no rows at all": lambda x: tf.constant(3.0),
}
NO_MEANS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda x: 0.1 * tf.reduce_sum(x * x),
    "a sum for each unit": lambda x: 0.1 * tf.reduce_sum(x * x, axis=0),
    "rows divided by their number": lambda x: (
        tf.reduce_sum(x * x, -1) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "whole numbers": lambda x: tf.reduce_sum(tf.cast(x > 0, tf.int32)),
}


class Add(keras.layers.Layer):
    """Adds a loss of what it is given."""

    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, inputs: Any) -> Any:
        self.add_loss(self.function(inputs))
        return inputs


class OneDevice(ByHand):
    """The loop by hand, which sums each added loss as ``compute_loss`` of Keras does."""

    def _step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
            for extra in self.model.losses:
                loss += tf.reduce_sum(tf.cast(extra, loss.dtype))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss


def adding(*functions: Any, dtype: str = "float32") -> Callable[[], keras.Model]:
    """A block with dropout and a layer that adds a loss for each of the functions."""

    def build() -> keras.Model:
        layers: list[Any] = [keras.Input((5,), dtype=dtype)]
        for i, function in enumerate(functions):
            dense = keras.layers.Dense(4, "tanh", dtype=dtype)
            dropout = keras.layers.Dropout(0.5, seed=3 + i, dtype=dtype)
            layers += [dense, dropout, Add(function, dtype=dtype)]
        return keras.Sequential([*layers, keras.layers.Dense(2, dtype=dtype)])

    return build


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


# Fails if a mean is divided once more, a value per row counts as a mean, or either counts once for
# each replica or part. In float64; the weights of each block tell which kind is wrong.
def test_what_layers_add_counts_as_on_one_device() -> None:
    batches = [tuple(array.astype("float64") for array in batch) for batch in BATCHES]
    loss = keras.losses.MeanSquaredError(dtype="float64")
    build = adding(*ADDED.values(), dtype="float64")
    expected = OneDevice(build, sgd, loss).train(batches)
    run = Replicated(3, build, sgd, loss, micro_batches=2)
    assert_same(run.train(batches), expected, weights=1e-13)


# Fails if a loss that is no mean over the rows, and counts as one, is not told by name; or if it is
# told on one replica in one piece, where it is what Keras makes of it.
@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_told(name: str) -> None:
    if name == "a sum":
        expected = OneDevice(adding(NO_MEANS[name]), sgd, SQUARES).train(BATCHES)
        alone = Replicated(1, adding(NO_MEANS[name]), sgd, SQUARES)
        assert_same(alone.train(BATCHES), expected)
    run = Replicated(2, adding(NO_MEANS[name]), sgd, SQUARES)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="an added loss is"):
        run.step((X, Y))


# Fails if an added loss of batches without dense rows, or of a layer that a forward calls, is
# lost, counted twice or as another kind; or if that of another model counts.
def test_whose_losses_count_and_for_which_batches() -> None:
    critic = keras.Sequential([keras.Input((2,)), Add(ADDED["a mean"])])

    def build() -> keras.Model:
        add = Add(ADDED["a mean"], name="adds")
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2), add])

    def forward(model: Any, batch: Any, training: bool) -> Any:
        x, y = batch
        hidden = model.layers[0](x)
        critic(y)  # As in Keras, its losses are not those of the model.
        return tmg.loss_sum("mse", y, model.get_layer("adds")(hidden))

    expected = OneDevice(build, sgd, SQUARES).train(BATCHES)
    assert_same(Replicated(3, build, sgd, None, forward=forward).train(BATCHES), expected)

    lengths = [3, 1, 2, 4, 0, 2, 1]
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(sum(lengths)) % 3, lengths)

    class Bags(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.add = keras.layers.Embedding(3, 2), Add(ADDED["one value per row"])

        def call(self, words: Any) -> Any:
            return self.add(tf.reduce_sum(self.table(words.to_tensor(shape=[None, 4])), 1))

    def bags() -> keras.Model:
        model = Bags()
        model(ragged)
        return model

    def sparse() -> keras.Model:
        add = Add(ADDED["a mean"])
        return keras.Sequential([keras.Input((5,), sparse=True), keras.layers.Dense(2), add])

    for make, x in ((bags, ragged), (sparse, tf.sparse.from_dense(X[:7]))):
        one, three = (
            float(Replicated(replicas, make, sgd, "mse").step((x, Y[:7]))["loss"])
            for replicas in (1, 3)
        )
        assert three == pytest.approx(one, rel=1e-6)
