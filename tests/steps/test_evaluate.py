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


def made(replicas, build):
    """The same model on one device and under a strategy."""
    keras.utils.set_random_seed(3)
    truth = build()
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = build()
    model.set_weights(truth.get_weights())
    return strategy, model, truth


@pytest.mark.parametrize("replicas", [1, 8])
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


@pytest.mark.parametrize("replicas", [2, 8])
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
