"""Draws for rows that a model repeats or stacks; those for rows that it joins are told."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.random_draws import ReplicaRows, drawing_rows
from tfmultigpu.steps.seeds import GlobalSeeds

_random = np.random.default_rng(2)
X = _random.normal(size=(40, 6)).astype("float32")
SEQUENCES = _random.normal(size=(40, 5, 6)).astype("float32")
SEED = (7, 3)
TABLE = _random.normal(size=(6, 6)).astype("float32")


def dropped(x):
    return tf.nn.experimental.stateless_dropout(x, 0.5, SEED)


def joined(x):
    return tf.concat([x, 2.0 * x], 0)


# Draws for several places of one row that follow each other, or for the rows alone.
BY_ROW = {
    "repeated": (X, lambda x: dropped(tf.repeat(x, 2, 0))),
    "stacked within": (X, lambda x: dropped(tf.reshape(tf.stack([x, x], 1), [-1, 6]))),
    "split again": (X, lambda x: dropped(tf.split(joined(x), 2)[0])),
    "sliced again": (X, lambda x: dropped(joined(x)[: tf.shape(x)[0]])),
    "gathered again": (X, lambda x: dropped(tf.gather(joined(x), tf.range(tf.shape(x)[0])))),
    "a column": (SEQUENCES, lambda x: dropped(x[:, 0])),
    "steps as rows": (SEQUENCES, lambda x: dropped(tf.reshape(x, [-1, 6]))),
    "lengths by Keras": (X, lambda x: x + keras.random.normal(keras.ops.shape(x), seed=3)),
    "columns joined": (X, lambda x: dropped(tf.concat([x, x], 1))),
    "gamma": (
        X, lambda x: tf.random.stateless_gamma(tf.shape(x), SEED, tf.exp(x), dtype=x.dtype)
    ),
    "categorical": (X, lambda x: tf.random.stateless_categorical(x, 3, SEED)),
    "numbers of 64 bits": (
        X, lambda x: tf.random.stateless_uniform(tf.shape(x), SEED, dtype="float64")
    ),
}  # fmt: skip


def drawing(function, x):
    """``function`` on some rows of ``x``, as a replica draws."""
    number = tf.TensorSpec([], tf.int64)

    @tf.function(input_signature=[number] * 3, autograph=False)
    def rows(first, count, total):
        places = [lambda one=one: one for one in (first, count, total)]
        held = ReplicaRows(*places, seeds=GlobalSeeds(tf.distribute.get_strategy()))
        with drawing_rows(held):
            return function(tf.slice(x, [first, *[0] * (x.ndim - 1)], [count, *x.shape[1:]]))

    return rows


def test_rows_draw_what_one_device_draws():
    wrong = []
    for name, (x, function) in BY_ROW.items():
        rows = drawing(function, x)
        for total, first, count in (
            *((29, 0, 29), (29, 0, 1), (29, 5, 10), (29, 28, 1)),
            *((2, 0, 2), (1, 0, 1)),
        ):
            whole = function(tf.constant(x[:total])).numpy()
            per_row = len(whole) // total
            expected = whole[first * per_row : (first + count) * per_row]
            if not np.allclose(rows(first, count, total).numpy(), expected, rtol=1e-6, atol=1e-6):
                wrong.append(f"{name}: rows {first} to {first + count} of {total}")
    assert wrong == []


def test_a_row_for_all_behind_the_rows_is_drawn_as_it_is():
    """What is joined is not twice the rows: it is drawn whole, as on one device of as many."""

    def function(x):
        return dropped(tf.concat([x, tf.ones([tf.shape(x)[1] // 2, 6])], 0))

    result = drawing(function, X)(10, 4, 20).numpy()
    np.testing.assert_array_equal(result, function(tf.constant(X[10:14])).numpy())


# A discriminator that sees real and fake rows at once ---------------------------------------------


class Pair:
    """A discriminator with dropout and noise, and what it is given."""

    def __init__(self, strategy):
        with strategy.scope():
            keras.utils.set_random_seed(7)
            self.model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, "tanh"),
                    keras.layers.Dropout(0.4, seed=3),
                    keras.layers.GaussianNoise(0.3, seed=4),
                    keras.layers.Dense(1),
                ]
            )
            self.optimizer = keras.optimizers.SGD(0.1)


def together(model, x):
    return tf.split(model(tf.concat([x, tf.sin(3.0 * x)], 0), training=True), 2, 0)


def one_by_one(model, x):
    return model(x, training=True), model(tf.sin(3.0 * x), training=True)


def trained(call, replicas, micro_batches):
    strategy = strategy_of(replicas)
    pair = Pair(strategy)

    def forward(model, x, training):
        real, fake = call(model, x)
        errors = tf.reduce_sum(tf.nn.softplus(-real) + tf.nn.softplus(fake), -1)
        return tmg.LossSum(tf.reduce_sum(errors), tf.cast(tf.shape(x)[0], tf.float32))

    step = tmg.make_train_step(
        pair.model, pair.optimizer, None, strategy, forward=forward, micro_batches=micro_batches
    )
    losses = [float(step(x)["loss"]) for (x,) in cut((X,), (7, 1, 2, 9, 4))]
    return losses, [one.numpy() for one in pair.model.variables]


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 2), (3, 1)])
def test_real_and_fake_rows_in_one_batch_are_told(replicas, micro_batches):
    """And the line that the warning has gives what one device gives."""
    with pytest.warns(tmg.ReplicaDependenceWarning) as caught:
        trained(together, replicas, micro_batches)
    text = str(caught[0].message)
    assert "Dropout" in text
    assert "Call the model for each: model(real), model(fake)" in text
    losses, weights = trained(one_by_one, 1, 1)
    ours = trained(one_by_one, replicas, micro_batches)
    np.testing.assert_allclose(ours[0], losses, rtol=2e-6)
    for one, other in zip(ours[1], weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
