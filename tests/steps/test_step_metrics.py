"""Metrics whose state is no sum are told; those in a layer, or that wait for shapes, are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each
from one_device import strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(17)
X = _random.normal(size=(15, 4)).astype("float32")
Y = _random.uniform(size=(15, 3)).astype("float32").round()


class Own(keras.metrics.Metric):
    """A metric with one variable, whose new value is ``new(old value, labels, predictions)``."""

    def __init__(self, new: Callable[..., Any]) -> None:
        super().__init__(name="mine")
        self.new = new
        self.state = self.add_variable((), "zeros", name="state")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(tf.cast(self.new(self.state.value, y_true, y_pred), tf.float32))

    def result(self) -> Any:
        return self.state + 0


def step_of(replicas: int, metric: Callable[[], Any]) -> Any:
    """A step with a metric made in the scope, and the metric."""
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "sigmoid")])
        made = metric()
    return tmg.make_eval_step(model, "mse", strategy, metrics=[made]), made


NO_SUMS: dict[str, Callable[..., Any]] = {
    "max": lambda old, y, p: tf.maximum(old, tf.reduce_max(p)),
    "last": lambda old, y, p: tf.reduce_mean(p),
    "product": lambda old, y, p: old * (1.0 + tf.reduce_mean(p)) + 1.0,
    "batches": lambda old, y, p: old + 1.0,
    "means of batches": lambda old, y, p: old + tf.reduce_mean(p),
    "squared sum of a batch": lambda old, y, p: old + tf.reduce_sum(p) ** 2,
}


# Fails if a state that adding over replicas makes wrong is not told, by the name of the metric; or
# if one replica, where nothing is added, does not take any metric.
@each("name", NO_SUMS)
def test_what_is_no_sum_over_rows_is_told(name: str) -> None:
    step, _ = step_of(2, lambda: Own(NO_SUMS[name]))
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"mine/state"):
        step((X, Y))
    if name == "max":
        alone, made = step_of(1, lambda: Own(NO_SUMS[name]))
        alone((X, Y))
        assert float(made.result()) == pytest.approx(float(tf.reduce_max(alone.model(X))))


class Columns(keras.metrics.Metric):
    """Makes its variable in its first update, as ``F1Score`` does."""

    def __init__(self) -> None:
        super().__init__(name="columns")
        self.totals: Any = None

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if self.totals is None:
            self.totals = self.add_variable((y_pred.shape[-1],), "zeros", name="totals")
        self.totals.assign_add(tf.reduce_sum(y_pred, axis=0))

    def result(self) -> Any:
        return tf.reduce_max(self.totals.value)


def test_metrics_that_wait_for_shapes() -> None:
    step, made = step_of(3, Columns)
    step((X, Y))
    expected = np.asarray(step.model(X)).sum(axis=0).max()
    assert float(made.result()) == pytest.approx(expected, rel=1e-6)


def test_what_is_no_metric_of_a_step() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        inputs = keras.Input((4,))
        heads = {name: keras.layers.Dense(3, name=name)(inputs) for name in ("kind", "size")}
        one, two = keras.Model(inputs, heads["kind"]), keras.Model(inputs, heads)
        optimizer, mean = keras.optimizers.SGD(0.0), keras.metrics.Mean()
        accuracy = keras.metrics.CategoricalAccuracy()
    losses, forward = dict.fromkeys(heads, "mse"), lambda model, batch, training: batch
    for model, loss, metric, options, text in (
        (one, "mse", "accuracy", {}, r"update_state.*Received: 'accuracy'"),
        (one, "mse", mean, {}, "Received: <Mean name=mean>"),
        (one, None, accuracy, {"forward": forward}, "With forward the step sees no labels"),
        (two, losses, accuracy, {}, "2 outputs.* the metrics do not fit.*a dict by name"),
    ):
        with pytest.raises(tmg.errors.LossError, match=text):
            tmg.make_train_step(model, optimizer, loss, strategy, metrics=[metric], **options)(
                (X, dict.fromkeys(heads, Y))
            )


# Metrics that a layer updates; in a forward: tests/promises/test_metrics_in_forward.py ------------


class Watched(keras.layers.Layer):
    """A layer that measures what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean(name="watched")

    def call(self, x: Any) -> Any:
        self.mean.update_state(x)
        return x


# Fails if a row counts once for each replica or part that holds a copy, in any kind of step.
def test_each_row_counts_once_in_training_evaluation_and_prediction() -> None:
    strategy = strategy_of(4)
    with strategy.scope():
        watched = Watched()
        model = keras.Sequential([keras.Input((4,)), watched, keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)
    options = {"micro_batches": 3, "verify": False}
    train = tmg.make_train_step(model, optimizer, "mse", strategy, **options)
    evaluate = tmg.make_eval_step(model, "mse", strategy)
    predict = tmg.make_predict_step(model, strategy)
    for call in (train, evaluate, lambda batch: predict(batch[0])):
        for rows in (1, 2, 5):
            watched.mean.reset_state()
            call((X[:rows], Y[:rows]))
            assert float(watched.mean.count.numpy()) == rows
            assert float(watched.mean.result()) == pytest.approx(X[:rows].mean(), rel=1e-5)
