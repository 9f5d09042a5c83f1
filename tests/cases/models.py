"""Models with shared layers, states, ragged or sparse inputs, no labels, or sixteen bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from law.model import Training
from problems import integers, network, normal

from cases.case import SIZES, Case, cut

ROWS = sum(SIZES)
X = normal(ROWS, 6)
Y = integers(4, ROWS)
LENGTHS = np.random.default_rng(7).integers(1, 5, ROWS)
RAGGED = tf.RaggedTensor.from_row_lengths(integers(6, LENGTHS.sum(), seed=8) + 1, LENGTHS)
SPARSE = tf.sparse.from_dense(np.where(normal(ROWS, 8, seed=9) > 0.4, normal(ROWS, 8), 0.0))


def classifier(model: Any, dtype: str = "float32", rate: float = 0.1) -> Training:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=dtype)
    return Training(model, keras.optimizers.SGD(rate, momentum=0.9), loss)


def shared() -> Training:
    """One layer three times, twice in a row, and one submodel on both inputs."""
    one, other = keras.Input((3,)), keras.Input((3,))
    twice = layers.Dense(3, "tanh", kernel_regularizer="l2", name="shared")
    tower = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(3)], name="tower")
    joined = layers.Concatenate()([tower(twice(twice(one))), tower(twice(other))])
    return classifier(keras.Model((one, other), layers.Dense(4)(joined)))


class InputAverage(keras.layers.Layer):
    """Follows the mean of what all replicas are given."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            total, count = tf.reduce_sum(x, 0), tf.cast(tf.shape(x)[0], tf.float32)
            context = tf.distribute.get_replica_context()
            if context is not None:
                total, count = context.all_reduce("SUM", [total, count])
            self.mean.assign(0.9 * self.mean + 0.1 * total / count)
        return x - self.mean


def averaging() -> Training:
    inner = [layers.Dense(5, "tanh"), InputAverage(), layers.Dense(4)]
    return classifier(network(6, *inner))


class RaggedMean(keras.Model):
    """Looks up each token and takes the mean over those of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = layers.Embedding(8, 3), layers.Dense(4)

    def build(self, shape: Any) -> None:
        self.table.build((None,))
        self.out.build((None, 3))
        self.built = True

    def call(self, tokens: Any) -> Any:
        found = tokens.with_flat_values(self.table(tokens.flat_values))
        return self.out(tf.reduce_mean(found, axis=1))


class SparseDense(keras.Model):
    """Multiplies a sparse matrix by a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(8, 4), name="table")
        self.out = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.out(tf.nn.tanh(tf.sparse.sparse_dense_matmul(x, self.table)))


def cut_sparse() -> list[Any]:
    starts = np.cumsum((0, *SIZES[:-1]))
    parts = [tf.sparse.slice(SPARSE, [i, 0], [n, 8]) for i, n in zip(starts, SIZES, strict=True)]
    return [(part, y) for part, (y,) in zip(parts, cut(Y), strict=True)]


IDS, WIDTH = 8209, 16  # So many that the parts on two devices are updated by lists of rows.


def table_of_sparse_ids() -> Training:
    ids = keras.Input((3,), dtype="int32", sparse=True)
    hidden = layers.Dense(4, "tanh")(layers.Flatten()(layers.Embedding(IDS, WIDTH)(ids)))
    model = keras.Model(ids, layers.Dense(1)(hidden))
    return Training(model, keras.optimizers.Adagrad(0.5), keras.losses.MeanSquaredError())


SOME_IDS = integers(IDS - 1, 6, 3, seed=5).astype("int32") + 1
SPARSE_IDS = [(tf.sparse.from_dense(SOME_IDS[[0, 1, 2, 3, 1, 0]]), normal(6, 1))]
ROOM = {f"CPU:{i}": 4.0 * IDS * WIDTH for i in range(2)}


class Autoencoder(keras.Model):
    """Adds its own loss, a mean over the rows; there are no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2, "tanh"), layers.Dense(6)

    def call(self, x: Any) -> Any:
        again = self.decoder(self.encoder(x))
        self.add_loss(tf.reduce_mean(tf.square(again - x)))
        return again


def autoencoder() -> Training:
    def whole(model: Any, x: Any) -> Any:
        return 0.0 * tf.reduce_sum(model(x, training=True))

    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    return Training(Autoencoder(), sgd, None, whole=whole)


def low(policy: str, output: str = "float32", normalised: bool = False) -> Callable[[], Training]:
    """Layers of sixteen bits; normalisation is what Keras computes in float32 among them."""

    def build() -> Training:
        inner: list[Any] = [layers.Dense(5, "tanh", dtype=policy, kernel_regularizer="l2")]
        if normalised:
            inner = [layers.Dense(6, use_bias=False, dtype=policy)]
            inner += [layers.BatchNormalization(synchronized=True, dtype=policy)]
            inner += [layers.LayerNormalization(dtype=policy)]
        inner += [layers.Dense(4, dtype=policy), layers.Activation("linear", dtype=output)]
        return classifier(network(6, *inner), output, 0.05)

    return build


def sixteen(name: str, build: Any, loss: float, rest: float, measured: str, **options: Any) -> Case:
    """Losses within one bound; weights and norms within a wider one."""
    reason = f"sums of few digits depend on how a batch is cut; measured: {measured}"
    return Case(
        name, build, cut(X, Y), options, bound=rest, loss_bound=loss, reason=reason, **ON_THREE
    )


PARTS, ON_THREE = {"micro_batches": 2}, {"replicas": (3,)}
DIVIDED = {"sharded": {"memory": ROOM}}
CASES = [
    Case("shared layers", shared, cut((X[:, :3], X[:, 3:]), Y), **ON_THREE),
    Case("a state computed from the rows of all", averaging, cut(X, Y), **ON_THREE),
    Case("ragged tokens", lambda: classifier(RaggedMean()), cut(RAGGED, Y), PARTS, **ON_THREE),
    Case("sparse rows", lambda: classifier(SparseDense()), cut_sparse(), PARTS, **ON_THREE),
    Case("sparse ids of a table", table_of_sparse_ids, SPARSE_IDS),
    Case("sparse ids of a table on two devices", table_of_sparse_ids, SPARSE_IDS, **DIVIDED),
    Case("no labels, a loss that a layer adds", autoencoder, [x for (x,) in cut(X)], **ON_THREE),
    sixteen(
        "mixed_float16 with a dynamic loss scale",
        low("mixed_float16"),
        1e-3,
        4e-3,
        "losses 2.1e-4, predictions 9.8e-4, weights 1.1e-4",
        loss_scale="dynamic",
        micro_batches=2,
    ),
    sixteen(
        "mixed_bfloat16 and normalisation",
        low("mixed_bfloat16", normalised=True),
        8e-3,
        3e-2,
        "losses 2.1e-3, predictions 7.8e-3, weights 3.3e-3",
    ),
    sixteen(
        "float16 throughout, loss and labels too",
        low("float16", output="float16"),
        4e-3,
        8e-3,
        "losses 8.9e-4, predictions 1.7e-3, weights 9.2e-4",
        loss_scale=1.0,  # None would be told.
    ),
]
