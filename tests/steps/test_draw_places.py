"""Draws for rows that a model joins, repeats or stacks: the numbers that one device draws."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import cut, strategy_of

import tfmultigpu as tmg
from tfmultigpu.steps.draw_shapes import passes_of
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


def apart(y, parts=2):
    """The parts of each row side by side, so that the result has the rows of the batch."""
    return tf.concat(tf.split(y, parts, 0), -1)


def noise(x):
    return x + keras.random.normal(keras.ops.shape(x), seed=3)


# How often the first axis of a draw goes through the rows, and what is computed.
JOINED = {
    "joined": (2, X, lambda x: apart(dropped(joined(x)))),
    "through layers": (2, X, lambda x: apart(dropped(tf.nn.relu(joined(x) @ TABLE + 1.0)))),
    "lengths by Keras": (2, X, lambda x: apart(noise(joined(x)))),
    "three": (3, X, lambda x: apart(dropped(tf.concat([x, 2.0 * x, 3.0 * x], 0)), 3)),
    "joined to what was joined": (3, X, lambda x: apart(dropped(tf.concat([joined(x), x], 0)), 3)),
    "tiled": (2, X, lambda x: apart(dropped(tf.tile(x, [2, 1])))),
    "tiled, joined": (4, X, lambda x: apart(dropped(tf.tile(joined(x), [2, 1])), 4)),
    "repeated": (1, X, lambda x: dropped(tf.repeat(x, 2, 0))),
    "stacked first": (2, X, lambda x: apart(dropped(tf.reshape(tf.stack([x, x]), [-1, 6])))),
    "stacked within": (1, X, lambda x: dropped(tf.reshape(tf.stack([x, x], 1), [-1, 6]))),
    "split again": (1, X, lambda x: dropped(tf.split(joined(x), 2)[0])),
    "sliced again": (1, X, lambda x: dropped(joined(x)[: tf.shape(x)[0]])),
    "gathered again": (1, X, lambda x: dropped(tf.gather(joined(x), tf.range(tf.shape(x)[0])))),
    "every second": (1, X, lambda x: dropped(joined(x)[::2])),
    "a column": (2, SEQUENCES, lambda x: apart(dropped(joined(x)[:, 0]))),
    "the last column": (2, SEQUENCES, lambda x: apart(dropped(joined(x)[..., -1]))),
    "columns": (2, SEQUENCES, lambda x: apart(dropped(tf.gather(joined(x), [0, 2], axis=1)))),
    "half the columns": (2, X, lambda x: apart(dropped(tf.split(joined(x), 2, axis=1)[1]))),
    "looked up": (2, X, lambda x: apart(dropped(tf.gather(TABLE, tf.argmax(joined(x), 1))))),
    "transposed within": (
        2, SEQUENCES, lambda x: apart(dropped(tf.transpose(joined(x), [0, 2, 1])))
    ),
    "steps as rows": (
        2, SEQUENCES, lambda x: apart(tf.reshape(dropped(tf.reshape(joined(x), [-1, 6])), [-1, 30]))
    ),
    "steps first": (
        5, SEQUENCES,
        lambda x: apart(dropped(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6])), 5),
    ),
    "columns joined": (1, X, lambda x: dropped(tf.concat([x, x], 1))),
    "added": (2, X, lambda x: apart(dropped(joined(x) + tf.tile(x, [2, 1])))),
    "in other orders": (1, X, lambda x: dropped(joined(x) + tf.repeat(x, 2, 0))),
    "truncated normal": (
        2, X, lambda x: apart(tf.random.stateless_truncated_normal(tf.shape(joined(x)), SEED))
    ),
    "gamma": (
        2, X,
        lambda x: apart(
            tf.random.stateless_gamma(tf.shape(joined(x)), SEED, tf.exp(joined(x)), dtype=x.dtype)
        ),
    ),
    "categorical": (2, X, lambda x: apart(tf.random.stateless_categorical(joined(x), 3, SEED))),
    "numbers of 64 bits": (
        2, X,
        lambda x: apart(tf.random.stateless_uniform(tf.shape(joined(x)), SEED, dtype="float64")),
    ),
}  # fmt: skip
# Neither in one place for each row, nor in whole passes.
UNSEEN = {"every second", "in other orders"}


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


def test_joined_rows_draw_what_one_device_draws(monkeypatch):
    """And the graph tells how often a draw goes through the rows."""
    found = []

    def noting(shape):
        found.append(passes_of(shape))
        return found[-1]

    monkeypatch.setattr("tfmultigpu.steps.draw_places.passes_of", noting)
    wrong = {}
    for name, (passes, x, function) in JOINED.items():
        found.clear()
        rows = drawing(function, x)
        rows.get_concrete_function()
        if set(found) != {passes}:
            wrong[name] = f"passes {found}, not {passes}"
        for total, first, count in (
            *((29, 0, 29), (29, 0, 1), (29, 5, 10), (29, 28, 1)),
            *((2, 0, 2), (1, 0, 1)),
        ):
            if name in UNSEEN and count < total:
                continue
            whole = function(tf.constant(x[:total])).numpy()
            per_row = len(whole) // total
            expected = whole[first * per_row : (first + count) * per_row]
            result = rows(first, count, total).numpy()
            if not np.allclose(result, expected, rtol=1e-6, atol=1e-6):
                wrong[name] = f"rows {first} to {first + count} of {total}"
    assert not wrong


def test_a_row_for_all_behind_the_rows_is_drawn_as_it_is():
    """What is joined is not twice the rows: it is drawn whole, as on one device of as many."""

    def function(x):
        return dropped(tf.concat([x, tf.ones([tf.shape(x)[1] // 2, 6])], 0))

    result = drawing(function, X)(10, 4, 20).numpy()
    np.testing.assert_array_equal(result, function(tf.constant(X[10:14])).numpy())


def test_graphs_that_were_looked_into_are_forgotten():
    import gc

    from tfmultigpu.steps import draw_shapes

    drawing(JOINED["joined"][2], X).get_concrete_function()
    gc.collect()
    before = len(draw_shapes._known)
    for _ in range(3):
        drawing(JOINED["joined"][2], X).get_concrete_function()
    gc.collect()
    assert len(draw_shapes._known) <= before


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

    def errors(self, model, x):
        real, fake = tf.split(model(tf.concat([x, tf.sin(3.0 * x)], 0), training=True), 2, 0)
        return tf.reduce_sum(tf.nn.softplus(-real) + tf.nn.softplus(fake), -1)


BATCHES = [batch for (batch,) in cut((X,), (7, 1, 2, 9, 4))]


@functools.cache
def on_one_device():
    pair = Pair(tf.distribute.get_strategy())

    @functools.partial(tf.function, input_signature=[tf.TensorSpec([None, 6])], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(pair.errors(pair.model, x))
        trained = pair.model.trainable_variables
        pair.optimizer.apply(tape.gradient(loss, trained), trained)
        return loss

    return [float(step(x)) for x in BATCHES], [one.numpy() for one in pair.model.variables]


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 2), (3, 1), (2, 2)])
def test_real_and_fake_rows_in_one_batch(replicas, micro_batches):
    strategy = strategy_of(replicas)
    pair = Pair(strategy)

    def forward(model, x, training):
        errors = pair.errors(model, x)
        return tmg.LossSum(tf.reduce_sum(errors), tf.cast(tf.shape(x)[0], tf.float32))

    step = tmg.make_train_step(
        pair.model, pair.optimizer, None, strategy, forward=forward, micro_batches=micro_batches
    )
    losses, weights = on_one_device()
    np.testing.assert_allclose([float(step(x)["loss"]) for x in BATCHES], losses, rtol=2e-6)
    for ours, theirs in zip(pair.model.variables, weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-6)
