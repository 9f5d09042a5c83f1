"""Random draws of N replicas are those of one device, bit for bit: each replica draws its rows.

A row's draw is made visible by a table of zeros with an entry for each row. The loss is the sum of
table times draw, so a step of SGD with a rate of 1 leaves minus the draw in the table.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Batch, Training, cut
from law.pair import Pair

ROWS, SIDE = 64, 4
_random = np.random.default_rng(8)
IMAGES = _random.uniform(0.1, 1.0, (ROWS, SIDE, SIDE, 2)).astype("float32")
layers = keras.layers


class Sampled(layers.Layer):
    """A sampling layer of the user's own: noise that depends on what it is given."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(seed)

    def call(self, mean: Any) -> Any:
        shape = tf.shape(mean)
        rows = keras.random.uniform((shape[0], 1, 1, 1), seed=self.seeds)
        return mean * rows + keras.random.normal(shape, seed=self.seeds)


class WithoutSeed(layers.Layer):
    """Draws by the generator that Keras keeps for draws to which nobody gave a seed."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(tf.shape(x))


def noises(seed: int | None) -> list[Any]:
    return [
        layers.Dropout(0.4, seed=seed),
        layers.GaussianNoise(0.5, seed=seed),
        layers.SpatialDropout2D(0.4, seed=seed),
        Sampled(seed),
        *([WithoutSeed()] if seed is None else []),
        layers.Dropout(0.2, noise_shape=(None, 1, SIDE, 1), seed=seed),
    ]


def augmentations(seed: int | None) -> list[Any]:
    return [
        layers.RandomFlip(seed=seed),
        layers.RandomTranslation(0.3, 0.3, seed=seed),
        layers.RandomContrast(0.5, value_range=(0, 1), seed=seed),
        layers.RandomRotation(0.2, seed=seed),
    ]


def training(make: Any, seed: int | None) -> Training:
    """Returns a model in which each layer draws for what the one before it has drawn."""
    images = keras.Input((SIDE, SIDE, 2), name="images")
    row = keras.Input((), dtype="int32", name="row")
    draws = [images]
    for layer in make(seed):
        draws.append(layer(draws[-1]))
    draws = layers.Flatten()(layers.Concatenate()(draws))
    entries = layers.Embedding(ROWS, draws.shape[-1], embeddings_initializer="zeros")(row)
    model = keras.Model({"images": images, "row": row}, layers.Multiply()([entries, draws]))
    return Training(model, keras.optimizers.SGD(1.0), Added(reduction="sum"))


class Added(keras.losses.Loss):
    """The sum of what is predicted: the slope of each entry is its draw."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_sum(y_pred, -1)


def batches_of(sizes: Any) -> list[Batch]:
    inputs = {"images": IMAGES, "row": np.arange(ROWS, dtype="int32")}
    return cut((inputs, np.zeros((ROWS, 1), "float32")), sizes)


def begin() -> None:
    """Has Keras make its generator for draws without a seed anew, as a program that starts."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)


# Fails if a replica draws numbers of its own, the numbers of other rows, or as many as its shard
# has; if a seed moves on once for each replica, or not at all; or if layers swap their draws.
@pytest.mark.parametrize(
    ("replicas", "make", "seed", "options"),
    [
        (3, noises, 5, {}),
        (2, noises, None, {"micro_batches": 2, "verify": False}),
        pytest.param(2, augmentations, 5, {"verify": False}, marks=pytest.mark.more),
        (3, augmentations, None, {"verify": False}),
    ],
    ids=["noise, N=3", "noise without seeds, N=2", "images, N=2", "images without seeds, N=3"],
)
def test_draws_are_those_of_one_device_bit_for_bit(
    replicas: int, make: Any, seed: int | None, options: dict[str, Any]
) -> None:
    sizes = (7, 4, 5, 3, 1, 2)  # Those of fewer rows than replicas last.
    batches = batches_of(sizes)
    pair = Pair(functools.partial(training, make, seed), batches[0], replicas, **options)
    begin()
    pair.plain.train(batches)
    begin()
    for shards in pair.shards(batches):
        pair.step(shards)
    table, truth = (
        next(v.numpy() for v in one.model.trainable_variables) for one in (pair.ours, pair.truth)
    )
    rows = sum(sizes)
    whole = sum(size for size in sizes if size >= replicas)
    assert len(np.unique(truth[:rows], axis=0)) == rows, "else draws repeat"
    np.testing.assert_array_equal(table[:whole], truth[:whole])
    # Copies of a small batch count 1/3 each, and d/3 + d/3 + d/3 may be a bit from d.
    np.testing.assert_allclose(table[whole:], truth[whole:], rtol=1e-6)
    states = [
        [v.numpy() for v in one.model.non_trainable_variables] for one in (pair.ours, pair.truth)
    ]
    np.testing.assert_array_equal(*states)
