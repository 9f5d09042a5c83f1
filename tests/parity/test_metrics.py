"""Metrics on several replicas count each row once, small batches and micro-batches included."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import cut, strategy_of

import tfmultigpu as tmg

SIZES = (7, 2, 16, 1, 3)

_random = np.random.default_rng(13)
X = _random.normal(size=(32, 6)).astype("float32")
Y = _random.integers(0, 3, 32)
TOKENS = np.where(
    np.arange(4) < _random.integers(1, 5, (32, 1)), _random.integers(1, 9, (32, 4)), 0
)
TAGS = _random.integers(0, 3, (32, 4))


def classifier() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])


def tagger() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 5, mask_zero=True),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def still() -> keras.optimizers.Optimizer:
    """Changes nothing, so that predictions can be compared after the fact."""
    return keras.optimizers.SGD(0.0)


def make_step(replicas, build, metrics, **options):
    """A step with metrics made by ``metrics()``, and the same metrics on one device."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model, optimizer, made = build(), still(), metrics()
    step = tmg.make_train_step(
        model, optimizer, "sparse_categorical_crossentropy", strategy, metrics=made, **options
    )
    return step, model, made, metrics()


def several() -> list[keras.metrics.Metric]:
    return [
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseTopKCategoricalAccuracy(k=2),
        keras.metrics.MeanIoU(3, sparse_y_pred=False),
        keras.metrics.SparseCategoricalCrossentropy(),
    ]


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(4, {}), (2, {"jit_compile": True})],
    ids=str,
)
def test_metrics_are_those_of_one_device(replicas, options):
    step, model, made, truth = make_step(replicas, classifier, several, **options)
    batches = cut((X, Y), SIZES)
    for x, y in batches:
        step((x, y))
        predicted = model(x)
        for metric in truth:
            metric.update_state(y, predicted)
    for metric, expected in zip(made, truth, strict=True):
        assert float(metric.result()) == pytest.approx(float(expected.result()), abs=1e-6)
    assert float(made[0].count.numpy()) == sum(SIZES), "each row once"
    assert float(tf.reduce_sum(made[2].total_cm.numpy())) == sum(SIZES), "each row once"


def test_padding_of_a_sequence_is_not_counted():
    def accuracy():
        return [keras.metrics.SparseCategoricalAccuracy()]

    step, model, (made,), (truth,) = make_step(3, tagger, accuracy, micro_batches=2)
    right = valid = 0
    for tokens, tags in cut((TOKENS, TAGS), SIZES):
        step((tokens, tags))
        predicted = model(tokens)
        truth.update_state(tags, predicted)
        right += ((np.argmax(predicted, axis=-1) == tags) & (tokens > 0)).sum()
        valid += (tokens > 0).sum()
    assert float(made.result()) == pytest.approx(float(truth.result()), abs=1e-6)
    assert float(made.result()) == pytest.approx(right / valid, abs=1e-6)
    assert float(made.count.numpy()) == float(truth.count.numpy())


def two_heads() -> keras.Model:
    inputs = keras.Input((6,))
    kind = keras.layers.Dense(3, "softmax", name="kind")(inputs)
    size = keras.layers.Dense(1, name="size")(inputs)
    return keras.Model(inputs, {"kind": kind, "size": size})


# What is refused ----------------------------------------------------------------------------------


def refused(metrics, **options):
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = classifier(), still()
    return tmg.make_train_step(
        model, optimizer, "sparse_categorical_crossentropy", strategy, metrics=metrics, **options
    )


def test_a_name_is_no_metric():
    with pytest.raises(
        tmg.errors.LossError, match=r"Received: 'accuracy'.*with strategy\.scope\(\)"
    ):
        refused(["accuracy"])


def test_a_mean_of_values_is_no_metric_of_a_step_nor_are_metrics_beside_forward():
    with strategy_of(2).scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        model, optimizer = classifier(), still()
    with pytest.raises(tmg.errors.LossError, match="Received: Mean 'mean', which takes values"):
        refused([mean])
    with pytest.raises(tmg.errors.LossError, match="With forward the step sees no labels"):
        tmg.make_train_step(
            model, optimizer, None, strategy_of(2), forward=lambda m, b, t: b, metrics=[accuracy]
        )


def test_a_metric_whose_state_is_no_sum():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value", aggregation="mean")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

        def result(self):
            return self.value

    with strategy_of(2).scope():
        largest = Largest()
    with pytest.raises(tmg.errors.LossError) as caught:
        refused([largest])
    message = str(caught.value)
    assert "The state of a metric must be sums" in message
    assert "aggregation='mean'" in message
    assert "'largest'" in message


def test_metrics_that_do_not_say_for_which_output():
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = two_heads(), still()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    losses = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
    step = tmg.make_train_step(model, optimizer, losses, strategy, metrics=[accuracy])
    with pytest.raises(tmg.errors.LossError, match=r"2 outputs.*Give a dict: metrics=\{'kind'"):
        step((X, {"kind": Y, "size": X[:, :1]}))
