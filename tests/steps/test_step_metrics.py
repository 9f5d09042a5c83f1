"""Metrics whose state is no sum are told; those in a forward, or that wait for shapes, are exact.

With fewer rows than replicas, or than micro-batches, several of them hold the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(17)
X = _random.normal(size=(15, 4)).astype("float32")
Y = _random.uniform(size=(15, 3)).astype("float32").round()
W = _random.uniform(0.5, 2.0, 15).astype("float32")
SIZES = (1, 2, 3, 4, 5)


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
@pytest.mark.parametrize("name", NO_SUMS)
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


# Metrics that a forward or a layer updates --------------------------------------------------------


class Watched(keras.layers.Layer):
    """A layer that measures what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean(name="watched")

    def call(self, x: Any) -> Any:
        self.mean.update_state(x)
        return x


class Made:
    """A model, metrics, and a forward function that updates them."""

    def __init__(self, replicas: int) -> None:
        self.strategy = strategy_of(replicas)
        keras.utils.set_random_seed(2)
        with self.strategy.scope():
            self.watched = Watched()
            layers = [self.watched, keras.layers.Dense(1, "sigmoid")]
            self.model = keras.Sequential([keras.Input((4,)), *layers])
            self.optimizer = keras.optimizers.SGD(0.0)
            self.metrics = self.made()

    def made(self) -> list[Any]:
        return [keras.metrics.Mean(), keras.metrics.MeanSquaredError(),
                keras.metrics.AUC(num_thresholds=11)]  # fmt: skip

    def update(self, metrics: list[Any], y: Any, y_pred: Any, weight: Any) -> None:
        metrics[0].update_state(y_pred[:, 0], sample_weight=weight)
        for metric in metrics[1:]:
            metric.update_state(y[:, :1], y_pred)

    def forward(self, model: Any, batch: Any, training: bool) -> Any:
        x, y, weight = batch
        y_pred = model(x, training=training)
        self.update(self.metrics, y, y_pred, weight)
        return tmg.loss_sum("mse", y[:, :1], y_pred)

    def hold(self, step: Any, sizes: tuple[int, ...] = SIZES) -> None:
        """Holds each metric, after one batch, to what Keras makes of the rows on one device."""
        start = 0
        for size in sizes:
            for metric in [*self.metrics, self.watched.mean]:
                metric.reset_state()
            x, y, weight = (array[start : start + size] for array in (X, Y, W))
            start += size
            step((x, y, weight))
            alone = self.made()
            kernel, bias = self.model.get_weights()
            self.update(alone, y, tf.sigmoid(x @ kernel + bias), weight)
            found, expected = ([float(m.result()) for m in ms] for ms in (self.metrics, alone))
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), size
            assert float(self.watched.mean.result()) == pytest.approx(x.mean(), rel=1e-5)

    def train_step(self, **options: Any) -> Any:
        options = {"forward": self.forward, "verify": False, **options}
        return tmg.make_train_step(self.model, self.optimizer, None, self.strategy, **options)


# Fails if a row counts once for each replica or part that holds a copy, in any kind of step.
def test_each_row_counts_once_in_training_evaluation_and_prediction() -> None:
    made = Made(2)
    made.hold(made.train_step(micro_batches=3))
    made.hold(made.train_step(jit_compile=True), (1, 3))
    made = Made(4)
    made.hold(tmg.make_eval_step(made.model, None, made.strategy, forward=made.forward))
    made.watched.mean.reset_state()
    step = tmg.make_train_step(made.model, made.optimizer, "mse", made.strategy, verify=False)
    step((X[:2], Y[:2, :1]))
    assert float(made.watched.mean.count.numpy()) == 2
    tmg.make_predict_step(made.model, made.strategy)(X[:3])
    assert float(made.watched.mean.count.numpy()) == 2 + 3
