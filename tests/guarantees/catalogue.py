"""All cases, in the order of the page: here those of layers, randomness, metrics and input."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from catalogue_training import CASES as TRAINING, EVEN, normalized
from guarantee import Case, Difference
from one_device import SEED, strategy_of
from problems import X, Y, crossentropy
from recipes import (
    by_fit,
    by_step,
    compiled,
    dataset_of,
    divided_by,
    fresh,
    mirrored,
    plainly,
    problem,
    rows,
)

import tfmultigpu as tmg

Layer = functools.partial(Case, section="Layers, randomness, metrics")
LOCAL = problem(rows(128), build=normalized(False))
SYNCHRONIZED = problem(rows(67), build=normalized(True))


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
        plain=plainly(by_fit, LOCAL),
        ours=lambda: told(functools.partial(by_step, LOCAL)),
        ours_kind="warning",
        ours_says="ReplicaDependenceWarning",
        reason="statistics of a shard are another model; the warning names the layers and the "
        "argument `synchronized=True`",
    ),
    Layer(
        name="batchnorm-synchronized-uneven",
        title="BatchNormalization with `synchronized=True`, a last batch of 3 rows",
        plain=plainly(by_fit, SYNCHRONIZED),
        ours=lambda: by_step(SYNCHRONIZED),
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


def from_the_largest(metric: Any) -> Difference:
    return Difference(abs(np.asarray(metric.result()) - Y[:128].max()), "metric")


def metric_in_a_loop() -> Difference:
    strategy = mirrored(2)
    with strategy.scope():
        model = fresh(EVEN).model
        metric = LargestLabel()

    @tf.function
    def update(batch: Any) -> None:
        strategy.run(lambda x, y: metric.update_state(y, model(x)), args=batch)

    for batch in strategy.experimental_distribute_dataset(dataset_of(EVEN)):
        update(batch)
    return from_the_largest(metric)


def metric_in_a_step() -> Difference:
    strategy = strategy_of(2)
    with strategy.scope():
        model = fresh(EVEN).model
        metric = LargestLabel()
    step = tmg.make_eval_step(model, crossentropy(), strategy, metrics=[metric])
    step.run(iter(tmg.distribute_dataset(dataset_of(EVEN), strategy)), 1000)
    return from_the_largest(metric)


def loss_of_an_output(evaluate: Callable[..., Any], strategy: Any) -> Difference:
    """The reported loss of the first of two outputs; the last batch has 3 rows."""
    with strategy.scope():
        x = keras.Input((6,))
        model = keras.Model(x, [keras.layers.Dense(1, None, True, "ones", name=n)(x) for n in "ab"])
        model.compile("sgd", ["mse", "mae"])
    features, y = X[:67] / 10, Y[:67, None].astype("float32") / 10
    data = tf.data.Dataset.from_tensor_slices((features, (y, y))).batch(64)
    expected = np.mean((y - features @ model.layers[1].get_weights()[0]) ** 2)
    return Difference(abs(evaluate(model, data, verbose=0)["a_loss"] - float(expected)), "loss")


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


STATEFUL = problem((X[:64, :, None], Y[:64]), 32, build=stateful)


METRICS = [
    Layer(
        name="metric-maximum",
        title="A metric of your own whose state is a maximum",
        plain=metric_in_a_loop,
        ours=lambda: told(metric_in_a_step),
        ours_kind="warning",
        ours_says="ReplicaDependenceWarning",
        reason="what is not a sum cannot be added over replicas; the warning of the first step "
        "names the metric",
    ),
    Layer(
        name="evaluate-two-outputs",
        title="`evaluate`, a last batch of 3 rows: the loss of an output, wrong on one device too",
        plain=lambda: loss_of_an_output(
            functools.partial(keras.Model.evaluate, return_dict=True), tf.distribute.get_strategy()
        ),
        ours=lambda: loss_of_an_output(
            functools.partial(tmg.evaluate, return_dict=True), strategy_of(2)
        ),
        links=("k#23084",),
    ),
    Layer(
        name="stateful-rnn",
        title="A `stateful` recurrent layer",
        plain=plainly(by_fit, STATEFUL),
        ours=lambda: by_step(STATEFUL),
        ours_kind="error",
        ours_says="ScopeError: A stateful layer",
        plain_says="the batch size of the input sequences",
        reason="the state of a row would have to follow it from replica to replica",
    ),
]

# Where data ends ----------------------------------------------------------------------------------


TWELVE = problem(rows(192), 16)


def endless_fit() -> Difference:
    model = compiled(EVEN, mirrored(2))
    model.fit(dataset_of(EVEN).repeat(), epochs=2, verbose=0)
    return Difference(0.0)


def endless_evaluate() -> Difference:
    model = compiled(EVEN, strategy_of(2))
    tmg.evaluate(model, dataset_of(EVEN).repeat())
    return Difference(0.0)


def counted_beyond_the_end() -> Difference:
    strategy = mirrored(2)
    with strategy.scope():
        training = fresh(TWELVE)
        model, optimizer = training.model, training.optimizer
        optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = divided_by(16)(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def five(iterator: Any) -> None:
        for _ in tf.range(5):
            strategy.run(train_step, args=next(iterator))

    iterator = iter(strategy.experimental_distribute_dataset(dataset_of(TWELVE)))
    try:
        for _ in itertools.count():
            five(iterator)
    except tf.errors.OutOfRangeError:
        pass
    return Difference(int(optimizer.iterations.numpy()) - 12, "steps counted that never ran")


def counted_by_run() -> Difference:
    strategy = strategy_of(2)
    with strategy.scope():
        training = fresh(TWELVE)
        model, optimizer = training.model, training.optimizer
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    iterator = iter(tmg.distribute_dataset(dataset_of(TWELVE), strategy))
    while int(step.run(iterator, 5)["steps"]):
        pass
    return Difference(int(optimizer.iterations.numpy()) - 12, "steps counted that never ran")


ENDS = [
    Case(
        section="Input",
        name="endless",
        title="`.repeat()` without a number of steps (`fit`; `tfmultigpu.evaluate`)",
        plain=endless_fit,
        ours=endless_evaluate,
        ours_kind="error",
        ours_says="DataError",
        reason="how far to read cannot be guessed",
        patience=12.0,
    ),
    Case(
        section="Input",
        name="end-inside-a-function",
        title="Five steps in one `tf.function`, where the data ends after twelve steps: "
        "`optimizer.iterations`",
        plain=counted_beyond_the_end,
        ours=counted_by_run,
    ),
]

CASES: list[Case] = [*TRAINING, *NORMALIZATION, *RANDOMNESS, *METRICS, *ENDS]
