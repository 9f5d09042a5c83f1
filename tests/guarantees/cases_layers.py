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
    Trained,
    X,
    Y,
    by_fit,
    by_step,
    compiled,
    crossentropy,
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


def far_from_zero(taken: Any, distribute: Callable[[Any], Any]) -> Difference:
    """Outputs of a synchronized BatchNormalization on inputs around 5000, against float64."""
    x = (5000.0 + X[:64]).astype("float32")
    with taken.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer.build((None, 6))

    @tf.function
    def call(batch: Any) -> Any:
        return taken.run(lambda shard: layer(shard, training=True), args=(batch,))

    (batch,) = distribute(tf.data.Dataset.from_tensor_slices(x).batch(64))
    outputs = np.concatenate([o.numpy() for o in taken.experimental_local_results(call(batch))])
    exact = x.astype("float64")
    exact = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + layer.epsilon)
    return Difference(largest([outputs], [exact]), "outputs, against float64")


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
        name="batchnorm-synchronized",
        title="BatchNormalization with `synchronized=True`, even batches",
        plain=lambda: weights(
            by_fit(EVEN.replace(build=normalized(True))),
            one_device(EVEN.replace(build=normalized(True))),
        ),
        ours=step_is_one_device(EVEN.replace(build=normalized(True))),
    ),
    Layer(
        name="batchnorm-synchronized-uneven",
        title="The same, a last batch of 3 rows",
        plain=lambda: weights(
            by_fit(UNEVEN_LAST.replace(build=normalized(True))),
            one_device(UNEVEN_LAST.replace(build=normalized(True))),
        ),
        ours=step_is_one_device(UNEVEN_LAST.replace(build=normalized(True))),
    ),
    Layer(
        name="batchnorm-far-from-zero",
        title="Synchronized BatchNormalization of inputs around 5000",
        plain=lambda: far_from_zero(mirrored(2), mirrored(2).experimental_distribute_dataset),
        ours=lambda: far_from_zero(
            strategy_of(2), lambda data: tmg.distribute_dataset(data, strategy_of(2))
        ),
        ours_kind="different",
        reason="the layer of Keras computes E[x²] - E[x]², which cancels, on one device too; it is "
        "not replaced. Standardise the inputs first",
    ),
]


# Dropout and augmentation -------------------------------------------------------------------------


def with_layer(make: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                make(),
                keras.layers.Dense(4),
            ]
        )

    return build


def flips() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Reshape((2, 3, 1)),
            keras.layers.RandomFlip(seed=3),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


RANDOM = {
    "dropout": ("Dropout", with_layer(lambda: keras.layers.Dropout(0.5, seed=3))),
    "noise": ("GaussianNoise", with_layer(lambda: keras.layers.GaussianNoise(0.5, seed=3))),
    "flip": ("RandomFlip", flips),
}


def fit_on_one_device(build: Callable[[], Any]) -> Trained:
    """Keras itself: augmentation draws when a model is called, and a loop calls it once more."""
    return by_fit(EVEN.replace(build=build, replicas=1))


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
    *(
        Layer(
            name=f"random-{name}",
            title=f"{title}: training on two replicas",
            plain=lambda build=build: weights(
                by_fit(EVEN.replace(build=build)), fit_on_one_device(build)
            ),
            ours=lambda build=build: weights(
                by_step(EVEN.replace(build=build)), fit_on_one_device(build)
            ),
            links=("tf#58433",),
        )
        for name, (title, build) in RANDOM.items()
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


BINARY = Problem((X[:99], (Y[:99] > 1).astype("float32")[:, None]))


def one_score() -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])


def evaluate_of_keras() -> dict[str, float]:
    problem = Problem(rows(128))
    model = compiled(problem, mirrored(2), metrics=["accuracy"])
    return model.evaluate(problem.dataset(), verbose=0, return_dict=True)


def evaluate_of_ours(problem: Problem) -> dict[str, float]:
    model = compiled(problem, strategy_of(2), metrics=["accuracy"])
    return tmg.evaluate(model, problem.dataset())


def evaluation(problem: Problem, found: dict[str, float]) -> Difference:
    model, _ = fresh(problem)
    model.compile(loss=crossentropy(), metrics=["accuracy"])
    right = model.evaluate(problem.dataset(), verbose=0, return_dict=True)
    return Difference(max(abs(found[name] - right[name]) for name in right), "loss and accuracy")


def predictions(predict: Callable[[Any, Any], Any], strategy: Any, count: int) -> Difference:
    problem = Problem(rows(count))
    with strategy.scope():
        model, _ = fresh(problem)
    right = fresh(problem)[0](X[:count])
    found = predict(model, tf.data.Dataset.from_tensor_slices(X[:count]).batch(33))
    if found.shape != right.shape:
        return Difference(abs(len(found) - count), "rows too many or too few")
    return Difference(largest([found], [right]), "predictions")


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
        name="metric-accuracy",
        title="Custom loop: `SparseCategoricalAccuracy`, a last batch of 35 rows",
        plain=lambda: metric_in_a_loop(keras.metrics.SparseCategoricalAccuracy, Problem(rows(99))),
        ours=lambda: metric_in_a_step(keras.metrics.SparseCategoricalAccuracy, Problem(rows(99))),
    ),
    Layer(
        name="metric-auc",
        title="Custom loop: `AUC`, a last batch of 35 rows",
        plain=lambda: metric_in_a_loop(keras.metrics.AUC, BINARY.replace(build=one_score)),
        ours=lambda: metric_in_a_step(
            keras.metrics.AUC, BINARY.replace(build=one_score, loss="binary_crossentropy")
        ),
    ),
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
        name="evaluate-even",
        title="`evaluate`, even batches",
        plain=lambda: evaluation(Problem(rows(128)), evaluate_of_keras()),
        ours=lambda: evaluation(Problem(rows(128)), evaluate_of_ours(Problem(rows(128)))),
    ),
    Layer(
        name="predict-uneven",
        title="`predict`: 100 rows in batches of 33",
        plain=lambda: predictions(
            lambda model, data: model.predict(data, verbose=0), mirrored(2), 100
        ),
        ours=lambda: predictions(tmg.predict, strategy_of(2), 100),
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
        alone=True,
    ),
]

CASES = [*NORMALIZATION, *RANDOMNESS, *METRICS]
