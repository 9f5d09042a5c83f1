"""Metrics that a forward function or a layer updates by itself count each row once.

With fewer rows than replicas, or than micro-batches, several of them hold the same rows.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(8)
X = _random.normal(size=(15, 3)).astype("float32")
Y = _random.integers(0, 2, (15, 1)).astype("float32")
W = _random.uniform(0.5, 2.0, 15).astype("float32")
SIZES = (1, 2, 3, 4, 5)


class Spread(keras.metrics.Metric):
    """A metric of one's own, which assigns a vector and adds a number."""

    def __init__(self, name: str = "spread", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.sums = self.add_variable((2,), "zeros", name="sums")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        values = tf.reshape(values, [-1])
        self.sums.assign(self.sums + tf.stack([tf.reduce_sum(values), tf.reduce_sum(values**2)]))
        self.rows.assign_add(tf.size(values))

    def result(self) -> Any:
        mean, square = tf.unstack(self.sums / tf.cast(self.rows, tf.float32))
        return square - mean**2


def make_metrics() -> dict[str, keras.metrics.Metric]:
    return {
        "mean": keras.metrics.Mean(),
        "weighted": keras.metrics.Mean(),
        "squares": keras.metrics.MeanSquaredError(),
        "auc": keras.metrics.AUC(num_thresholds=11),
        "spread": Spread(),
    }


def update(metrics: dict[str, keras.metrics.Metric], y: Any, y_pred: Any, weight: Any) -> None:
    metrics["mean"].update_state(y_pred)
    metrics["weighted"].update_state(y_pred[:, 0], sample_weight=weight)
    metrics["squares"].update_state(y, y_pred)
    metrics["auc"].update_state(y, y_pred)
    metrics["spread"].update_state(y_pred)


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
            self.model = keras.Sequential(
                [keras.Input((3,)), self.watched, keras.layers.Dense(1, "sigmoid")]
            )
            self.optimizer = keras.optimizers.SGD(0.0)
            self.metrics = make_metrics()

    def forward(self, model: Any, batch: Any, training: bool) -> Any:
        x, y, weight = batch
        y_pred = model(x, training=training)
        update(self.metrics, y, y_pred, weight)
        return tmg.loss_sum("mse", y, y_pred)

    def hold(self, step: Any, sizes: tuple[int, ...] = SIZES) -> None:
        """Holds each metric, after one batch, to what Keras makes of the rows on one device."""
        start = 0
        for size in sizes:
            for metric in [*self.metrics.values(), self.watched.mean]:
                metric.reset_state()
            x, y, weight = (array[start : start + size] for array in (X, Y, W))
            start += size
            step((x, y, weight))
            alone = make_metrics()
            first = self.strategy.experimental_local_results
            kernel, bias = (first(v.value)[0] for v in self.model.trainable_variables)
            update(alone, y, tf.sigmoid(x @ kernel + bias), weight)
            found = {name: float(metric.result()) for name, metric in self.metrics.items()}
            expected = {name: float(metric.result()) for name, metric in alone.items()}
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), size
            assert int(self.metrics["spread"].rows.numpy()) == size
            assert float(self.watched.mean.result()) == pytest.approx(x.mean(), rel=1e-5)


def test_in_training() -> None:
    made = Made(2)
    made.hold(
        tmg.make_train_step(
            made.model,
            made.optimizer,
            None,
            made.strategy,
            forward=made.forward,
            micro_batches=(1, 3),
        )
    )


def test_compiled_by_xla() -> None:
    """XLA on one device cannot read a metric's parts on all: the step says it is not verified."""
    made = Made(2)
    options = {"forward": made.forward, "jit_compile": True}
    step = tmg.make_train_step(made.model, made.optimizer, None, made.strategy, **options)
    with pytest.warns(
        tmg.ReplicaDependenceWarning, match="Trying to access resource watched/total"
    ):
        made.hold(step, (1, 3))


@pytest.mark.parametrize("replicas", [4])
def test_in_evaluation(replicas: int) -> None:
    made = Made(replicas)
    made.hold(tmg.make_eval_step(made.model, None, made.strategy, forward=made.forward))


def test_a_layer_beside_a_loss_and_in_prediction() -> None:
    made = Made(4)
    step = tmg.make_train_step(made.model, made.optimizer, "mse", made.strategy)
    step((X[:2], Y[:2]))
    assert float(made.watched.mean.count.numpy()) == 2
    tmg.make_predict_step(made.model, made.strategy)(X[:3])
    assert float(made.watched.mean.count.numpy()) == 2 + 3


def test_metrics_count_as_before_after_an_error() -> None:
    made = Made(4)

    def fails(model: Any, batch: Any, training: bool) -> Any:
        raise ArithmeticError("in forward")

    step = tmg.make_train_step(made.model, made.optimizer, None, made.strategy, forward=fails)
    with pytest.raises(ArithmeticError):
        step((X[:2], Y[:2], W[:2]))
    alone = keras.metrics.Mean()
    alone.update_state([1.0, 3.0])
    assert float(alone.result()) == 2.0
    assert not hasattr(keras.Variable.assign, "__wrapped__")
