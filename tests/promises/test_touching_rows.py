"""Code whose result depends on how a batch was cut is told by name, and can be made exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT, Training, regression
from law.pair import Pair, strategy_of
from law.plain import PlainLoop, assert_values

import tfmultigpu as tmg

layers = keras.layers
ROWS = 7


def sequential(*inner: Any) -> Any:
    return keras.Sequential([keras.Input((4,), dtype="float64"), *inner, layers.Dense(2, **FLOAT)])


class Largest(layers.Layer):
    """Divides by the largest value that it has seen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.largest = self.add_weight(name="largest", initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(tf.abs(x))))
        return x / self.largest


class KeepsMean(layers.Layer):
    """Keeps a mean of the means of its batches, and does not use it in training."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = self.add_weight(
            name="mean", initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x))
            return x
        return x - self.mean


class CountsBatches(layers.Layer):
    """Keeps the rows of its last batch; nothing that is trained depends on them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows = self.add_weight(
            name="rows", initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, x: Any) -> Any:
        self.rows.assign(tf.cast(tf.shape(x)[0], self.rows.dtype))
        return x


def views(y: Any, z: Any) -> Any:
    """The loss of SimCLR, for each row: its two views against all other views of the batch."""
    rows = tf.shape(z)[0]
    left, right = tf.math.l2_normalize(z[:, :2], 1), tf.math.l2_normalize(z[:, 2:], 1)
    every = tf.concat([left, right], 0)
    alike = tf.matmul(every, every, transpose_b=True) / 0.5
    alike = tf.linalg.set_diag(alike, tf.fill([2 * rows], tf.constant(-1e9, z.dtype)))
    labels = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
    values = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, alike)
    return tf.reduce_mean(tf.reshape(values, [2, rows]), 0)


def views_by_labels(y: Any, z: Any) -> Any:
    """The same on any number of replicas: labels hold the place of each row in the batch."""
    return tf.gather(views(y, tmg.gather_rows(z)), tf.cast(y[:, 0], tf.int32))


def views_by_rows(y: Any, z: Any) -> Any:
    rows = tmg.rows()
    return views(y, tmg.gather_rows(z))[rows.first : rows.first + rows.count]


def against(y: Any, z: Any, every: Any) -> Any:
    """A row against all rows: what is its own is not read from those that were gathered."""
    alike = tf.matmul(z, every, transpose_b=True)
    places = tf.cast(y[:, 0], tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(places, alike)


def against_itself(y: Any, z: Any) -> Any:
    return against(y, z, z)


def against_gathered(y: Any, z: Any) -> Any:
    return against(y, z, tmg.gather_rows(z))


class Float64Loss(keras.losses.Loss):
    """A loss of one value a row, which Keras would compute in float32."""

    def __init__(self, values: Callable[[Any, Any], Any]) -> None:
        super().__init__(dtype="float64")
        self.call = values


def encoder() -> Any:
    return keras.Sequential(
        [keras.Input((4,), dtype="float64"), layers.Dense(5, "tanh", **FLOAT),
         layers.Dense(4, **FLOAT)]
    )  # fmt: skip


def step_of(replicas: int, build: Callable[[], Any], loss: Any = "mse", **options: Any) -> Any:
    strategy = strategy_of(replicas)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, optimizer = build(), keras.optimizers.SGD(0.1)
    return model, tmg.make_train_step(model, optimizer, loss, strategy, **options)


def told(step: Any, batch: Any) -> list[str]:
    """Trains on a batch and returns what was said about the cut."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(batch)
    kind = tmg.errors.ReplicaDependenceWarning
    return [str(warning.message) for warning in caught if issubclass(warning.category, kind)]


def centred() -> Any:
    return sequential(layers.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centred", **FLOAT))


def centred_in_float32() -> Any:
    centre = layers.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="centre")
    return keras.Sequential([keras.Input((4,)), centre, layers.Dense(2)])


def slightly_centred() -> Any:
    return sequential(
        layers.Lambda(lambda x: x + 0.01 * tf.reduce_mean(x * x), name="slight", **FLOAT)
    )


def local_norm() -> Any:
    return sequential(layers.BatchNormalization(name="local_norm", **FLOAT))


TOLD = {
    "a batch mean in a Lambda": (2, centred, "mse", "centred"),
    "a batch mean in float32": (2, centred_in_float32, "mse", "centre"),
    "a hundredth of the batch mean in a Lambda": (2, slightly_centred, "mse", "slight"),
    "a BatchNormalization that is not synchronized": (3, local_norm, "mse", "local_norm"),
    "a contrastive loss": (3, encoder, views, "gather_rows"),
    "a number of rows kept in a layer": (
        2,
        lambda: sequential(CountsBatches(name="counts", **FLOAT)),
        "mse",
        "counts",
    ),
    "a maximum kept in a layer": (
        2,
        lambda: sequential(Largest(name="top", **FLOAT)),
        "mse",
        "top",
    ),
}


# Fails if the first step is not compared with one device, or another part of the program is named.
@pytest.mark.parametrize("case", TOLD)
def test_the_first_step_names_what_depends_on_the_cut(case: str) -> None:
    replicas, build, loss, name = TOLD[case]
    _, step = step_of(replicas, build, loss)
    assert step.verification is None
    first, second = regression([ROWS, ROWS])
    messages = told(step, first)
    assert len(messages) == 1
    assert name in messages[0]
    assert step.verification.outcome == "different"
    assert told(step, second) == []  # Once is enough.


# Fails if nothing is checked with verify=True after the first step, or anything with verify=False.
def test_verify_says_which_steps_are_checked() -> None:
    build = lambda: sequential(KeepsMean(name="kept", **FLOAT))  # noqa: E731
    even, uneven = regression([9, 5])
    _, step = step_of(3, build, verify=True)
    assert told(step, even) == []
    assert step.verification.outcome == "same"
    assert all("kept" in " ".join(told(step, uneven)) for _ in range(2))  # At each step.
    assert step.verification.outcome == "different"
    _, step = step_of(2, centred, verify=False)
    assert told(step, even) == []
    assert step.verification is None


# Fails if only the first batch is checked: a mean of equal means is right until they are unequal.
@pytest.mark.parametrize("rows", [9, 27])  # The check takes four rows, and eight or nine.
def test_the_first_batch_that_does_not_divide_evenly_is_checked_too(rows: int) -> None:
    _, step = step_of(3, lambda: sequential(KeepsMean(name="kept", **FLOAT)))
    even, uneven = regression([rows, 5])
    assert told(step, even) == []
    assert "kept" in " ".join(told(step, uneven))


# Fails if rows are missing, stand twice (two rows on three replicas) or in another order, or if the
# gradient of a row leaves out what it does to the rows of another replica.
@pytest.mark.parametrize(
    ("replicas", "whole", "own"),
    [
        (2, views, views_by_labels),
        (3, views, views_by_labels),
        (3, against_itself, against_gathered),
        (3, views, views_by_rows),
    ],
)
def test_gathered_rows_make_a_contrastive_loss_exact(replicas: int, whole: Any, own: Any) -> None:
    def build() -> Training:
        values = own if tf.distribute.has_strategy() else whole
        return Training(encoder(), keras.optimizers.SGD(0.1), Float64Loss(values))

    batches = [(x, np.arange(len(x))[:, None]) for x, _ in regression([7, 2, 1, 5])]
    Pair(build, batches[0], replicas).hold(batches, steps=3)


# Fails if the statistics of a layer are those of one replica's rows, in training or as kept.
def test_synchronize_batch_norm_mends_a_model_of_others() -> None:
    batches = regression([7, 1, 2, 5])
    keras.utils.set_random_seed(3)
    loss = keras.losses.MeanSquaredError(**FLOAT)
    truth = Training(local_norm(), keras.optimizers.SGD(0.1), loss)
    PlainLoop(truth, batches[0]).train(batches)

    def mended() -> Any:
        model = local_norm()
        tmg.synchronize_batch_norm(model)
        return model

    model, step = step_of(3, mended, loss)
    for batch in batches:
        assert told(step, batch) == []
    names = [variable.path for variable in truth.model.variables]
    values = [[v.numpy() for v in m.variables] for m in (model, truth.model)]
    assert_values(*values, names)


# Fails if a program that only the replicas can compute, as two shapes agree there by chance, is
# blamed on its replicas, or if what one device says of it is lost in a traceback.
def test_what_one_device_cannot_compute_is_wrong_in_the_program() -> None:
    def loss(labels: Any, predictions: Any) -> Any:
        return tf.square(tf.reshape(labels, [-1]) - predictions)

    _, step = step_of(2, lambda: sequential(layers.Dense(3, **FLOAT)), loss)
    x, _ = regression([4])[0]
    (said,) = told(step, (x, np.ones([4, 1])))
    assert "one device fails on this batch, and the replicas do not" in said
    assert "Incompatible shapes: [4] vs. [4,2]. What one device" in said
    assert "wrong in the program itself" in said
    assert 'File "' not in said


# Fails if a metric that Keras makes of a function is told by a name that its user never wrote.
def test_a_metric_is_told_by_the_name_of_its_function() -> None:
    def largest_prediction(labels: Any, predictions: Any) -> Any:
        return tf.reduce_max(predictions) * tf.ones_like(predictions[:, 0])

    with strategy_of(2).scope():
        model = sequential()
        model.compile("sgd", "mse", metrics=[largest_prediction])
    x, y = regression([7])[0]
    with pytest.warns(tmg.ReplicaDependenceWarning, match="'largest_prediction/total'"):
        tmg.fit(model, x, y, batch_size=7, verbose=0)
