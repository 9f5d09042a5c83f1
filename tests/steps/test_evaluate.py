"""Evaluation and prediction: exact over every row, each row once, in order."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, difference, plain, strategy_of

import tfmultigpu as tmg

SIZES = (7, 2, 16, 1, 3, 9)
ROWS = sum(SIZES)

_random = np.random.default_rng(23)
X = _random.normal(size=(ROWS, 6)).astype("float32")
Y = _random.integers(0, 3, ROWS)
W = _random.uniform(0.2, 2.0, ROWS).astype("float32")
TOKENS = np.where(
    np.arange(4) < _random.integers(1, 5, (ROWS, 1)), _random.integers(1, 9, (ROWS, 4)), 0
)
TAGS = _random.integers(0, 3, (ROWS, 4))


def classifier() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def tagger() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 5, mask_zero=True),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def made(replicas, build):
    """The same model on one device and under a strategy."""
    keras.utils.set_random_seed(3)
    truth = build()
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = build()
    model.set_weights(truth.get_weights())
    return strategy, model, truth


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_loss_and_metrics_over_all_rows(replicas):
    strategy, model, truth = made(replicas, classifier)
    with strategy.scope():
        metrics = [keras.metrics.SparseCategoricalAccuracy()]
        weighted = [keras.metrics.SparseCategoricalCrossentropy()]
    step = tmg.make_eval_step(
        model,
        "sparse_categorical_crossentropy",
        strategy,
        metrics=metrics,
        weighted_metrics=weighted,
    )
    before = model.get_weights()
    loss = keras.losses.SparseCategoricalCrossentropy()
    predicted = truth(X, training=False)
    (penalty,) = truth.losses
    batches = cut((X, Y, W), SIZES)
    for x, y, weight in batches:
        logs = plain(step((x, y, weight)))
        assert set(logs) == {"loss", "weight"}
        alone = loss(y, truth(x, training=False), sample_weight=weight) + penalty
        assert logs["loss"] == pytest.approx(float(alone), abs=1e-6)
        assert logs["weight"] == len(x)
    assert difference(model.get_weights(), before) == 0.0
    accuracy = np.mean(np.argmax(predicted, axis=-1) == Y)
    assert float(metrics[0].result()) == pytest.approx(accuracy, abs=1e-6)
    assert float(metrics[0].count.numpy()) == ROWS
    entropy = keras.metrics.SparseCategoricalCrossentropy()
    entropy.update_state(Y, predicted, sample_weight=W)
    assert float(weighted[0].result()) == pytest.approx(float(entropy.result()), abs=1e-6)

    data = tmg.distribute_dataset(as_dataset(batches), strategy)
    whole = float(loss(Y, predicted, sample_weight=W) + penalty)
    logs = plain(step.run(iter(data), 100))
    assert logs["steps"] == len(SIZES)
    assert logs["weight"] == ROWS
    assert logs["loss"] == pytest.approx(whole, abs=1e-6)
    total = sum(float(log["loss"]) * float(log["weight"]) for log in map(step, data))
    assert total / ROWS == pytest.approx(whole, abs=1e-6)


def test_masked_and_weighted_losses_are_means_over_what_counts():
    strategy, model, truth = made(3, tagger)
    reduction = "mean_with_sample_weight"
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    step = tmg.make_eval_step(model, loss, strategy)
    weight = np.repeat(W[:, None], 4, 1)
    data = tmg.distribute_dataset(as_dataset(cut((TOKENS, TAGS, weight), SIZES)), strategy)
    logs = plain(step.run(iter(data), 100))
    expected = loss(TAGS, truth(TOKENS), sample_weight=weight)
    assert logs["loss"] == pytest.approx(float(expected), abs=1e-6)
    assert logs["weight"] == pytest.approx((weight * (TOKENS > 0)).sum(), rel=1e-6)


def two_heads() -> keras.Model:
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(3, "softmax", name="kind")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": keras.layers.Dense(1, name="size")(inputs)})


def test_several_outputs():
    strategy, model, truth = made(3, two_heads)
    losses = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    step = tmg.make_eval_step(model, losses, strategy, loss_weights={"kind": 2.0, "size": 0.5})
    batches = [(x, {"kind": y, "size": x[:, :1]}) for x, y in cut((X, Y), SIZES)]
    logs = [plain(step(batch)) for batch in batches]
    predicted = truth(X)
    kind = keras.losses.SparseCategoricalCrossentropy()(Y, predicted["kind"])
    size = keras.losses.MeanSquaredError()(X[:, :1], predicted["size"])
    for name, expected in (
        ("kind_loss", kind),
        ("size_loss", size),
        ("loss", 2.0 * kind + 0.5 * size),
    ):
        mean = sum(log[name] * log["weight"] for log in logs) / ROWS
        assert mean == pytest.approx(float(expected), abs=1e-6), name


def test_metrics_alone():
    strategy, model, truth = made(2, two_heads)
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    step = tmg.make_eval_step(model, None, strategy, metrics={"kind": accuracy})
    for x, y in cut((X, Y), SIZES):
        assert plain(step((x, {"kind": y, "size": y}))) == {"loss": 0.0, "weight": len(x)}
    expected = np.mean(np.argmax(truth(X)["kind"], axis=-1) == Y)
    assert float(accuracy.result()) == pytest.approx(expected, abs=1e-6)


def test_forward():
    strategy, model, truth = made(3, classifier)

    def forward(model, batch, training):
        assert training is False
        x, y = batch
        return tmg.loss_sum("sparse_categorical_crossentropy", y, model(x, training=training))

    step = tmg.make_eval_step(model, None, strategy, forward=forward)
    logs = [plain(step(batch)) for batch in cut((X, Y), SIZES)]
    expected = keras.losses.SparseCategoricalCrossentropy()(Y, truth(X, training=False))
    mean = sum(log["loss"] * log["weight"] for log in logs) / ROWS
    assert mean == pytest.approx(float(expected + tf.add_n(truth.losses)), abs=1e-6)


# Predictions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_each_row_is_predicted_once_and_in_order(replicas):
    strategy, model, truth = made(replicas, classifier)
    step = tmg.make_predict_step(model, strategy)
    batches = cut((X, Y), SIZES)
    expected = truth(X, training=False).numpy()
    parts = [step(x) for x, _ in batches]
    assert [len(part) for part in parts] == list(SIZES)
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-6)
    shares = tuple(range(1, replicas + 1))
    data = tmg.distribute_dataset(as_dataset(batches), strategy, shares=shares)
    parts = [step(batch) for batch in data]  # labels beside the features are left alone
    assert [len(part) for part in parts] == list(SIZES)
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-6)


class Describe(keras.layers.Layer):
    """Outputs that are not floats."""

    def call(self, inputs):
        rounded = tf.cast(tf.round(inputs[:, 0]), tf.int32)
        return {
            "number": rounded,
            "text": tf.strings.as_string(rounded),
            "positive": inputs[:, 0] > 0,
            "pair": [inputs[:, :2], inputs[:, 2:]],
        }


@pytest.mark.parametrize("replicas", [1, 3])
def test_structures_strings_and_integers(replicas):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.describe = Describe()
            self.built = True

        def call(self, inputs):
            return self.describe(inputs)

    strategy = strategy_of(replicas)
    with strategy.scope():
        model = Model()
    step = tmg.make_predict_step(model, strategy)
    parts = [step(x) for (x,) in cut((X,), SIZES)]
    assert set(parts[0]) == {"number", "text", "positive", "pair"}
    numbers = np.round(X[:, 0]).astype(int)
    joined = tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
    np.testing.assert_array_equal(joined["number"], numbers)
    assert [int(text) for text in joined["text"]] == numbers.tolist()
    np.testing.assert_array_equal(joined["positive"], X[:, 0] > 0)
    np.testing.assert_array_equal(joined["pair"][0], X[:, :2])
    np.testing.assert_array_equal(joined["pair"][1], X[:, 2:])


def test_a_list_of_outputs():
    def build():
        inputs = keras.Input((6,))
        return keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(1)(inputs)])

    strategy, model, truth = made(2, build)
    step = tmg.make_predict_step(model, strategy)
    parts = [step(x) for (x,) in cut((X,), SIZES)]
    for i, expected in enumerate(truth(X)):
        joined = np.concatenate([part[i] for part in parts])
        np.testing.assert_allclose(joined, expected, atol=1e-6)


def test_a_dict_of_inputs_and_a_model_that_is_not_built():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs["left"]) - self.dense(inputs["right"])

    strategy = strategy_of(3)
    with strategy.scope():
        model = Model()
    step = tmg.make_predict_step(model, strategy)
    outputs = step({"left": X, "right": X})
    np.testing.assert_allclose(outputs, np.zeros((ROWS, 2)), atol=1e-6)


def test_predicting_inside_a_function_of_the_user():
    strategy, model, truth = made(3, classifier)
    step = tmg.make_predict_step(model, strategy)

    @tf.function
    def classes(iterator):
        return tf.argmax(step(next(iterator)), axis=-1)

    data = tmg.distribute_dataset(as_dataset(cut((X, Y), SIZES)), strategy)
    iterator = iter(data)
    found = np.concatenate([classes(iterator) for _ in SIZES])
    np.testing.assert_array_equal(found, np.argmax(truth(X, training=False), axis=-1))


def test_outside_the_scope():
    model = classifier()
    strategy = strategy_of(2)
    with pytest.raises(tmg.ScopeError, match="The model was created outside the scope"):
        tmg.make_predict_step(model, strategy)(X)
    with pytest.raises(tmg.ScopeError, match="The model was created outside the scope"):
        tmg.make_eval_step(model, "mse", strategy)((X, Y))
