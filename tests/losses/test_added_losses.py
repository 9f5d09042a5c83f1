"""Losses that layers add: sums over rows, means and one value per row, as Keras counts them."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut

import tfmultigpu as tmg
from tfmultigpu.losses import added_losses

_random = np.random.default_rng(5)
X = _random.normal(size=(9, 5)).astype("float32")
Y = _random.normal(size=(9, 2)).astype("float32")
SIZES = (5, 2, 7, 1, 3)
SQUARES = keras.losses.MeanSquaredError()

ADDED = {
    "a sum": lambda x: 0.1 * tf.reduce_sum(x * x),
    "a mean": lambda x: tf.reduce_mean(x * x),
    "one value per row": lambda x: 0.1 * tf.reduce_mean(x * x, axis=-1),
    "one value per row, with an axis": lambda x: 0.1 * tf.reduce_mean(x * x, -1, keepdims=True),
    "a mean for each unit": lambda x: tf.reduce_mean(x * x, axis=0),
    "a sum for each unit": lambda x: 0.1 * tf.reduce_sum(x * x, axis=0),
    "rows divided by their number": lambda x: (
        tf.reduce_sum(x * x, -1) / tf.cast(tf.shape(x)[0], x.dtype)
    ),
    "whole numbers": lambda x: tf.reduce_sum(tf.cast(x > 0, tf.int32)),
    "no rows at all": lambda x: tf.constant(3.0),
}


class Add(keras.layers.Layer):
    """Adds a loss of what it is given."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


class OneDevice(ByHand):
    """The loop by hand, which sums each added loss as ``compute_loss`` of Keras does."""

    def _step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self._loss(y, self.model(x, training=True))
            for extra in self.model.losses:
                loss += tf.reduce_sum(tf.cast(extra, loss.dtype))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss


def adding(*functions, dropout=0.5, dtype="float32"):
    """A block with dropout and a layer that adds a loss for each of the functions."""

    def build():
        layers = [keras.Input((5,))]
        for i, function in enumerate(functions):
            layers += [
                keras.layers.Dense(4, "tanh", dtype=dtype),
                keras.layers.Dropout(dropout, seed=3 + i, dtype=dtype),
                Add(function, dtype=dtype),
            ]
        last = keras.layers.Dense(2, dtype="float64" if dtype == "float64" else "float32")
        return keras.Sequential([*layers, last])

    return build


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def test_what_layers_add_counts_as_on_one_device():
    """In float64, to the last digits; the weights of each block tell which kind is wrong."""
    batches = cut((X.astype("float64"), Y.astype("float64")), SIZES)
    loss = keras.losses.MeanSquaredError(dtype="float64")
    build = adding(*ADDED.values(), dtype="float64")
    expected = OneDevice(build, sgd, loss).train(batches)
    run = Replicated(3, build, sgd, loss, micro_batches=2)
    assert_same(run.train(batches), expected, weights=1e-13)


def test_keras_itself_counts_so():
    """``fit`` of Keras, not a loop by hand; parts and replicas together."""
    keras.utils.set_random_seed(7)
    model = adding(ADDED["one value per row"], dropout=0.0)()
    model.compile(sgd(), "mse")
    run = Replicated(
        2, adding(ADDED["one value per row"], dropout=0.0), sgd, "mse", micro_batches=(2, 1)
    )
    run.model.set_weights(model.get_weights())
    losses = []
    for batch in cut((X, Y), SIZES):
        losses.append(float(run.step(batch)["loss"]))
        assert model.train_on_batch(*batch) == pytest.approx(losses[-1], rel=1e-5)
    for one, other in zip(run.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_sum_in_forward_and_in_step_run():
    def forward(model, batch, training):
        x, y = batch
        return tmg.loss_sum("mse", y, model(x, training=training))

    build = adding(ADDED["a sum"])
    batches = cut((X, Y), (4, 4, 4))
    expected = OneDevice(build, sgd, SQUARES).train(batches)
    run = Replicated(3, build, sgd, None, forward=forward)
    data = tmg.distribute_dataset(
        tf.data.Dataset.from_tensor_slices(
            tuple(np.stack(one) for one in zip(*batches, strict=True))
        ),
        run.strategy,
    )
    logs = run.step.run(iter(data), 3)
    assert float(logs["loss"]) == pytest.approx(np.mean(expected.losses), rel=1e-6)
    for one, other in zip(run.model.variables, expected.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other, atol=1e-6)


def test_activity_regularizers_of_keras_and_one_that_is_no_mean_of_rows():
    """Sparsity compares the mean of all rows with a target: it counts as a mean of the shards."""

    def sparsity(activity):
        rate = tf.reduce_mean(tf.sigmoid(activity), axis=0)
        rows = tf.cast(tf.shape(activity)[0], rate.dtype)  # Keras divides by the rows again.
        return rows * tf.reduce_sum(0.1 * tf.math.log(0.1 / rate))

    def build(regularizer):
        return lambda: keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(2, activity_regularizer=regularizer)]
        )

    for regularizer in ("l1", "l2"):
        batches = cut((X, Y), SIZES)
        expected = OneDevice(build(regularizer), sgd, SQUARES).train(batches)
        assert_same(Replicated(2, build(regularizer), sgd, SQUARES).train(batches), expected)
    run = Replicated(2, build(sparsity), sgd, SQUARES)
    rate = tf.sigmoid(run.model(X[:4]))
    parts = [tf.reduce_mean(rate[i : i + 2], axis=0) for i in (0, 2)]
    mean = np.mean([tf.reduce_sum(0.1 * tf.math.log(0.1 / part)) for part in parts])
    expected = float(SQUARES(Y[:4], run.model(X[:4]))) + mean
    with pytest.warns(tmg.ReplicaDependenceWarning, match="an added loss is"):
        logs = run.step((X[:4], Y[:4]))
    assert float(logs["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_sum_of_what_is_zero_for_the_weights_there_are():
    """A layer that begins at zero: what it adds is nothing yet, and a sum later."""

    def build():
        zero = keras.layers.Dense(4, kernel_initializer="zeros")
        return keras.Sequential(
            [keras.Input((5,)), zero, Add(ADDED["a sum"]), keras.layers.Dense(2)]
        )

    batches = cut((X, Y), SIZES)
    expected = OneDevice(build, sgd, SQUARES).train(batches)
    assert_same(Replicated(3, build, sgd, SQUARES).train(batches), expected)


def test_draws_that_cannot_be_held_still_do_not_confuse_a_trial():
    """``tf.random`` draws other numbers at each call; the kinds are seen through them."""
    noise = {
        "sum": lambda x: tf.reduce_sum(tf.square(1.0 + 0.1 * tf.random.normal(tf.shape(x)))),
        "mean": lambda x: tf.reduce_mean(tf.square(1.0 + 0.1 * tf.random.normal(tf.shape(x)))),
    }
    for kind, function in noise.items():
        run = Replicated(2, adding(function), sgd, "mse")
        with pytest.warns(tmg.ReplicaDependenceWarning, match="RandomStandardNormal"):
            loss = run.train([(X[:8], Y[:8])]).losses[0]
        near = 8 * 4 if kind == "sum" else 1.0
        assert loss == pytest.approx(near, rel=0.3, abs=1.5), kind


def test_a_trial_leaves_nothing_behind():
    class Counts(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.raw = tf.Variable(0.0, trainable=False)

        def call(self, inputs):
            self.calls.assign_add(1.0)
            self.raw.assign_add(1.0, read_value=False)
            self.add_loss(tf.reduce_sum(inputs * keras.random.uniform(tf.shape(inputs))))
            return inputs

    def build():
        counts = Counts(name="counts")
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dropout(0.5, seed=3), counts, keras.layers.Dense(2)]
        )

    run = Replicated(2, build, sgd, "mse")
    metric = run.step  # Built before numbers are drawn below.
    seeds = [v for v in run.model.variables if "seed" in v.path]
    assert seeds
    before = [v.numpy() for v in seeds]
    random.seed(1)
    expected = [random.random() for _ in range(3)]
    random.seed(1)
    keras.random.uniform((1,))  # Makes the generator for draws without a seed, from Python's.
    random.seed(1)
    with pytest.warns(tmg.ReplicaDependenceWarning, match="AssignAddVariableOp"):
        metric((X, Y))
    assert [random.random() for _ in range(3)] == expected
    assert float(run.model.get_layer("counts").calls.numpy()) == 1.0
    assert float(run.model.get_layer("counts").raw.numpy()) == 1.0
    after = [v.numpy() for v in seeds]
    assert [tuple(a - b) for a, b in zip(after, before, strict=True)] == [(0, 1)] * len(seeds)


def test_one_trial_for_all_replicas_steps_and_parts(monkeypatch):
    trials = []
    original = added_losses.run_in_thread
    monkeypatch.setattr(added_losses, "run_in_thread", lambda f: trials.append(f) or original(f))
    run = Replicated(3, adding(ADDED["a sum"]), sgd, "mse", micro_batches=2)
    run.train(cut((X, Y), SIZES))
    assert len(trials) == 1
    Replicated(1, adding(ADDED["a sum"]), sgd, "mse").train([(X, Y)])
    assert len(trials) == 1, "on one device in one piece it does not matter"
    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    tmg.make_eval_step(plain, "mse")((X, Y))
    assert len(trials) == 1, "nothing is added"


def test_what_cannot_be_tried_counts_by_its_shape():
    def refusing(function):
        def added(x):
            # Made-up rows are no more than 8, and this is code that wants more.
            with tf.control_dependencies([tf.debugging.assert_greater(tf.shape(x)[0], 11)]):
                return function(tf.identity(x))

        return added

    batch = (np.concatenate([X, X, X]), np.concatenate([Y, Y, Y]))  # 27 rows, 13 and 14
    for name in ("a mean", "one value per row"):
        build = adding(ADDED[name], dropout=0.0)
        expected = OneDevice(build, sgd, SQUARES).train([batch])
        run = Replicated(2, adding(refusing(ADDED[name]), dropout=0.0), sgd, SQUARES)
        assert_same(run.train([batch]), expected, what=name)


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_batches_of_every_kind(kind):
    lengths = [3, 1, 2, 4, 0, 2, 1]
    ragged = tf.RaggedTensor.from_row_lengths(np.arange(sum(lengths)) % 3, lengths)
    features = ragged if kind == "ragged" else tf.sparse.from_dense(X[:7])

    def build():
        add = Add(ADDED["a sum"])
        if kind == "sparse":
            return keras.Sequential([keras.Input((5,), sparse=True), keras.layers.Dense(2), add])

        class Bags(keras.Model):
            def __init__(self):
                super().__init__()
                self.table = keras.layers.Embedding(3, 2)
                self.add = add

            def call(self, words):
                return self.add(tf.reduce_sum(self.table(words.to_tensor(shape=[None, 4])), 1))

        model = Bags()
        model(ragged)
        return model

    def loss_of(replicas):
        run = Replicated(replicas, build, sgd, "mse")
        return float(run.step((features, Y[:7]))["loss"])

    assert loss_of(3) == pytest.approx(loss_of(1), rel=1e-6)


# Whose losses count -------------------------------------------------------------------------------


def test_a_layer_of_the_model_that_forward_calls_adds_its_losses():
    def build():
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(2), Add(ADDED["a sum"], name="adds")]
        )

    def forward(model, batch, training):
        x, y = batch
        hidden = model.layers[0](x)
        return tmg.loss_sum("mse", y, model.get_layer("adds")(hidden))

    batches = cut((X, Y), SIZES)
    expected = OneDevice(build, sgd, SQUARES).train(batches)
    assert_same(Replicated(3, build, sgd, None, forward=forward).train(batches), expected)
