"""Layers, randomness, metrics."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases_losses import UNEVEN_LAST, normalized, step_is_one_device
from guarantee import Case, Difference
from one_device import SEED, strategy_of
from recipes import (
    Problem,
    X,
    Y,
    by_fit,
    by_step,
    fresh,
    largest,
    mirrored,
    one_device,
    rows,
    weights,
)

import tfmultigpu as tmg

Layer = functools.partial(Case, section="Layers, randomness, metrics")
EVEN = Problem(rows(128))


# Batch normalisation ------------------------------------------------------------------------------


def told(measure: Callable[[], Difference]) -> Difference:
    """What was measured, with the warning that came with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure()
    (warning,) = [w for w in caught if issubclass(w.category, tmg.ReplicaDependenceWarning)]
    text = f"{warning.category.__name__}: {str(warning.message).splitlines()[0]}"
    return dataclasses.replace(found, warned=text)


NORMALIZATION = [
    Layer(
        name="batchnorm",
        title="BatchNormalization as it comes: each replica has its own statistics",
        plain=lambda: weights(
            by_fit(EVEN.replace(build=normalized(False))),
            one_device(EVEN.replace(build=normalized(False))),
        ),
        ours=lambda: told(step_is_one_device(EVEN.replace(build=normalized(False)))),
        ours_kind="warning",
        ours_says="ReplicaDependenceWarning",
        reason="statistics of a shard are another model; the warning names the layers and the "
        "argument `synchronized=True`",
    ),
    Layer(
        name="batchnorm-synchronized-uneven",
        title="BatchNormalization with `synchronized=True`, a last batch of 3 rows",
        plain=lambda: weights(
            by_fit(UNEVEN_LAST.replace(build=normalized(True))),
            one_device(UNEVEN_LAST.replace(build=normalized(True))),
        ),
        ours=step_is_one_device(UNEVEN_LAST.replace(build=normalized(True))),
    ),
]


# Dropout and augmentation -------------------------------------------------------------------------


class Mask(keras.layers.Layer):
    """Hands the mask of a dropout out as the output of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def call(self, inputs: Any) -> Any:
        return self.dropout(tf.ones_like(inputs), training=True)


def masks() -> Any:
    return keras.Sequential([keras.Input((64,)), Mask()])


def equal_masks(predict: Callable[[Any, Any], Any], strategy: Any) -> Difference:
    """Of 8 rows on each of two replicas, how many have the mask of their neighbour."""
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = masks()
    found = np.asarray(predict(model, np.ones((16, 64), "float32")))
    assert found.shape == (16, 64)
    same = int((found[:8] == found[8:]).all(1).sum())
    return Difference(same, "rows with the mask of a row of the other replica, of 8")


RANDOMNESS = [
    Layer(
        name="dropout-masks",
        title="Dropout: masks on two replicas",
        plain=lambda: equal_masks(
            lambda model, x: model.predict(x, batch_size=16, verbose=0), mirrored(2)
        ),
        ours=lambda: equal_masks(
            lambda model, x: tmg.predict(model, x, batch_size=16), strategy_of(2)
        ),
        links=("tf#58433",),
    ),
]


# Metrics ------------------------------------------------------------------------------------------


def right_metrics(make: Callable[[], Any], problem: Problem) -> np.ndarray:
    """Over the same predictions, made on one device with weights that do not change."""
    model, _ = fresh(problem)
    metric = make()
    for x, y in problem.batches():
        metric.update_state(y, model(x))
    return np.asarray(metric.result())


def metric_in_a_loop(make: Callable[[], Any], problem: Problem) -> Difference:
    strategy = mirrored(2)
    with strategy.scope():
        model, _ = fresh(problem)
        metric = make()

    @tf.function
    def update(batch: Any) -> None:
        strategy.run(lambda x, y: metric.update_state(y, model(x)), args=batch)

    for batch in strategy.experimental_distribute_dataset(problem.dataset()):
        update(batch)
    right = right_metrics(make, problem)
    return Difference(largest([np.asarray(metric.result())], [right]), "metric")


def metric_in_a_step(make: Callable[[], Any], problem: Problem) -> Difference:
    strategy = strategy_of(2)
    with strategy.scope():
        model, _ = fresh(problem)
        metric = make()
    step = tmg.make_eval_step(model, problem.loss, strategy, metrics=[metric])
    step.run(iter(tmg.distribute_dataset(problem.dataset(), strategy)), 1000)
    right = right_metrics(make, problem)
    return Difference(largest([np.asarray(metric.result())], [right]), "metric")


class LargestLabel(keras.metrics.Metric):
    """A state that is a maximum."""

    def __init__(self) -> None:
        super().__init__(name="largest_label")
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        seen = keras.ops.cast(keras.ops.max(y_true), "float32")
        self.largest.assign(keras.ops.maximum(self.largest, seen))

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.largest)


def stateful() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 1), batch_size=32),
            keras.layers.LSTM(3, stateful=True),
            keras.layers.Dense(4),
        ]
    )


def stateful_problem() -> Problem:
    return Problem((X[:64, :, None], Y[:64]), 32, build=stateful)


METRICS = [
    Layer(
        name="metric-maximum",
        title="A metric of your own whose state is a maximum",
        plain=lambda: metric_in_a_loop(LargestLabel, Problem(rows(128))),
        ours=lambda: told(lambda: metric_in_a_step(LargestLabel, Problem(rows(128)))),
        ours_kind="warning",
        ours_says="ReplicaDependenceWarning",
        reason="what is not a sum cannot be added over replicas; the warning of the first step "
        "names the metric",
    ),
    Layer(
        name="stateful-rnn",
        title="A `stateful` recurrent layer",
        plain=lambda: weights(by_fit(stateful_problem()), one_device(stateful_problem())),
        ours=lambda: weights(by_step(stateful_problem()), one_device(stateful_problem())),
        ours_kind="error",
        ours_says="ScopeError: A stateful layer",
        plain_says="the batch size of the input sequences",
        reason="the state of a row would have to follow it from replica to replica",
    ),
]

CASES = [*NORMALIZATION, *RANDOMNESS, *METRICS]
