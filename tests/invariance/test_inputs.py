"""Kinds of data: structures, ragged, sparse and string tensors, integers, unknown lengths."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import SIZES, Case, cut, integers, normal
from keras import layers

from tfmultigpu.addons.testing import Training

ROWS = sum(SIZES)
X = normal(ROWS, 4)
Y = integers(3, ROWS)
LENGTHS = np.random.default_rng(7).integers(1, 5, ROWS)
RAGGED = tf.RaggedTensor.from_row_lengths(integers(6, LENGTHS.sum(), seed=8) + 1, LENGTHS)
SPARSE = tf.sparse.from_dense(np.where(normal(ROWS, 8, seed=9) > 0.4, normal(ROWS, 8), 0.0))


def classifier(model: Any) -> Training:
    return Training(
        model,
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def cut_tensor(x: Any) -> list[Any]:
    """Batches of a ragged or sparse tensor, with labels."""
    batches, start = [], 0
    for size in SIZES:
        if isinstance(x, tf.SparseTensor):
            part = tf.sparse.slice(x, [start, 0], [size, x.shape[1]])
        else:
            part = x[start : start + size]
        batches.append((part, Y[start : start + size]))
        start += size
    return batches


# Structures ---------------------------------------------------------------------------------------


class Bag(keras.Model):
    """Takes a tuple of a dict and an array, in which one feature is a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(5, "tanh"), layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        features, numbers = inputs
        joined = tf.concat([features["x"], features["one"][:, None], numbers], -1)
        return self.out(self.hidden(joined))


# Tensors that are not dense -----------------------------------------------------------------------


class RaggedMean(keras.Model):
    """Looks up each token and takes the mean over those of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = layers.Embedding(8, 3), layers.Dense(3)

    def build(self, shape: Any) -> None:
        self.table.build((None,))
        self.out.build((None, 3))
        self.built = True

    def call(self, tokens: Any) -> Any:
        found = tokens.with_flat_values(self.table(tokens.flat_values))
        return self.out(tf.reduce_mean(found, axis=1))


class RaggedToDense(keras.Model):
    """Pads inside the model, to the longest row of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory = layers.Embedding(8, 3, mask_zero=True), layers.GRU(3)
        self.out = layers.Dense(3)

    def call(self, tokens: Any) -> Any:
        return self.out(self.memory(self.table(tokens.to_tensor())))


class SparseDense(keras.Model):
    """Multiplies a sparse matrix by a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(8, 4), name="table")
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(tf.nn.tanh(tf.sparse.sparse_dense_matmul(x, self.table)))


def sparse_functional() -> Training:
    inputs = keras.Input((8,), sparse=True)
    return classifier(keras.Model(inputs, layers.Dense(3)(layers.Dense(4, "tanh")(inputs))))


# Types --------------------------------------------------------------------------------------------


def switches() -> Training:
    """A bool for each feature, and labels that are bool too."""
    inputs = keras.Input((4,), dtype="bool")
    scores = layers.Dense(1)(layers.Lambda(lambda x: tf.cast(x, tf.float32))(inputs))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return Training(keras.Model(inputs, scores), keras.optimizers.SGD(0.1, momentum=0.9), loss)


def images() -> Training:
    inputs = keras.Input((4, 4, 1), dtype="uint8")
    hidden = layers.Conv2D(3, 2, activation="relu")(layers.Rescaling(1 / 128)(inputs))
    return classifier(keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden))))


def words() -> Training:
    inputs = keras.Input((2,), dtype="string")
    codes = layers.StringLookup(vocabulary=["low", "high"])(inputs)
    hidden = layers.Flatten()(layers.Embedding(4, 3)(codes))
    return classifier(keras.Model(inputs, layers.Dense(3)(hidden)))


# No labels ----------------------------------------------------------------------------------------


class Autoencoder(keras.Model):
    """Adds its own loss, a mean over the rows; there are no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2, "tanh"), layers.Dense(4)

    def call(self, x: Any) -> Any:
        again = self.decoder(self.encoder(x))
        self.add_loss(tf.reduce_mean(tf.square(again - x)))
        return again


def autoencoder() -> Training:
    return Training(Autoencoder(), keras.optimizers.SGD(0.1, momentum=0.9))


BAG = ({"x": X, "one": normal(ROWS, seed=2)}, normal(ROWS, 2, seed=3))
WORDS = np.array(["low", "high", "none"])[integers(3, ROWS, 2, seed=4)]
SMALL = integers(256, ROWS, 4, 4, 1).astype("uint8")


CASES = [
    Case("a tuple of a dict and an array", lambda: classifier(Bag()), cut(BAG, Y)),
    Case(
        "ragged tokens",
        lambda: classifier(RaggedMean()),
        cut_tensor(RAGGED),
        options={"micro_batches": 2, "predict": True},
    ),
    Case(
        "ragged tokens padded by the model", lambda: classifier(RaggedToDense()), cut_tensor(RAGGED)
    ),
    Case(
        "sparse rows",
        lambda: classifier(SparseDense()),
        cut_tensor(SPARSE),
        options={"micro_batches": 2},
    ),
    Case("a sparse Keras input", sparse_functional, cut_tensor(SPARSE)),
    Case("bools", switches, cut(X > 0, Y[:, None] > 0)),
    Case("uint8 images", images, cut(SMALL, Y.astype("uint8"))),
    Case("strings", words, cut(WORDS, Y)),
    Case("no labels, a loss that a layer adds", autoencoder, [x for (x,) in cut(X)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_give_what_one_device_gives(case: Case) -> None:
    case.hold()
