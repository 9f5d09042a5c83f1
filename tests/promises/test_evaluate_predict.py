"""``tmg.evaluate`` counts, and ``tmg.predict`` returns, every example once, as one device does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import cut
from law.pair import assert_logs, dataset_of, strategy_of

import tfmultigpu as tmg

layers = keras.layers
_random = np.random.default_rng(29)
# Fewer rows than replicas, rows that no number of replicas divides, one row last.
WAYS = ((7, 2, 1, 5, 3, 21, 1), (1, 39), (1,) * 40)
ROWS = 40
X = _random.normal(size=(ROWS, 4))
SIZE = _random.normal(size=(ROWS, 2))
KIND = _random.integers(0, 2, (ROWS, 1))
ROW = np.arange(ROWS, dtype="int32")[:, None]
WEIGHTS = _random.choice([0.0, 0.5, 1.0, 3.0], (2, ROWS))
WEIGHTS[:, 7:10] = 0.0  # Two batches whose weights are all zero.


pytestmark = pytest.mark.usefixtures("float64")


class Mean(keras.layers.Layer):
    """Adds a mean over the rows of its batch to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
        return inputs


def build() -> tuple[Any, Any]:
    """A model of two outputs, and one for predictions that has the number of the row too."""
    keras.utils.set_random_seed(3)
    moving = keras.initializers.RandomUniform(0.5, 1.5, seed=5)
    x, row = keras.Input((4,), name="x"), keras.Input((1,), dtype="int32", name="row")
    hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")(x)
    hidden = layers.BatchNormalization(
        moving_mean_initializer=moving, moving_variance_initializer=moving
    )(hidden)
    hidden = Mean()(layers.Dropout(0.5)(hidden))
    outputs = {
        "size": layers.Dense(2, name="size")(hidden),
        "kind": layers.Dense(1, "sigmoid", name="kind")(hidden),
    }
    model = keras.Model({"x": x}, outputs)
    numbers = {"number": layers.Reshape((), name="number")(row)}
    predictor = keras.Model({"x": x, "row": row}, outputs | numbers)
    losses, metrics = keras.losses, keras.metrics
    model.compile(
        "sgd",
        {"size": losses.Huber(reduction="mean_with_sample_weight"),
         "kind": losses.BinaryCrossentropy()},
        loss_weights={"size": 0.5, "kind": 2.0},
        metrics={"size": [metrics.RootMeanSquaredError(name="rms")],
                 "kind": [metrics.AUC(5, name="area")]},
        weighted_metrics={"size": [metrics.MeanAbsoluteError(name="error")],
                          "kind": [metrics.Precision(name="precision")]},
    )  # fmt: skip
    return model, predictor


@functools.cache
def replicated(replicas: int) -> tuple[Any, Any]:
    with strategy_of(replicas).scope():
        return build()


@functools.cache
def truth() -> tuple[dict[str, float], Any]:
    """What Keras says on one device of all examples in one batch: the only mean is then exact."""
    model, predictor = build()
    x, y, weights = everything()
    logs = model.evaluate(x, y, sample_weight=weights, batch_size=ROWS, return_dict=True, verbose=0)
    return logs, predictor.predict(x | {"row": ROW}, batch_size=ROWS, verbose=0)


evaluated = functools.partial(tmg.evaluate, return_dict=True)


def everything() -> tuple[Any, Any, Any]:
    return {"x": X}, {"size": SIZE, "kind": KIND}, dict(zip(("size", "kind"), WEIGHTS, strict=True))


def data_of(arrays: Any, sizes: Sequence[int]) -> tf.data.Dataset:
    """Returns a dataset of these batches, whose length nobody knows."""
    batches = cut(arrays, sizes)
    return dataset_of(lambda: batches, batches[0])


# Fails if a batch, an output or a replica is a mean of its own, if weights that are all zero count
# as rows, if regularisation counts once a batch or replica, or if what was counted before stays.
@pytest.mark.parametrize("replicas", [2, 3])
def test_evaluation_is_exact_over_all_examples(replicas: int) -> None:
    expected, _ = truth()
    assert len(expected) == 7  # The losses of two outputs, their sum and four metrics.
    for sizes in WAYS:
        tmg.evaluate(replicated(replicas)[0], data_of(everything(), (5,)))  # Leaves nothing behind.
        logs = evaluated(replicated(replicas)[0], data_of(everything(), sizes))
        assert_logs(logs, expected, sizes)


# Fails if a row is missing, stands twice or in another place, if copies of a small batch come
# back, or if dropout or the statistics of a batch are in a prediction.
@pytest.mark.parametrize("replicas", [2, 3])
def test_predictions_are_all_rows_once_and_in_order(replicas: int) -> None:
    _, expected = truth()
    x, y = {"x": X, "row": ROW}, everything()[1]
    for sizes, arrays in zip(WAYS, ((x,), (x, y), (x,)), strict=True):
        outputs = tmg.predict(replicated(replicas)[1], data_of(arrays, sizes))
        assert set(outputs) == {"size", "kind", "number"}
        np.testing.assert_array_equal(outputs["number"], np.arange(ROWS))
        assert outputs["number"].dtype == np.int32
        for name in ("size", "kind"):
            np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-7, err_msg=name)


# Fails if arrays are cut or ordered otherwise than datasets, if their weights or the number of
# steps are lost, or if shares change what a row counts or where it stands.
@pytest.mark.parametrize(("replicas", "shares"), [(2, (1, 3)), (3, (1, 5, 2))])
def test_arrays_steps_and_shares(replicas: int, shares: Any) -> None:
    expected, predicted = truth()
    model, predictor = replicated(replicas)
    x, y, weights = everything()
    rows = {"x": X, "row": ROW}
    logs = [evaluated(model, x, y, sample_weight=weights, batch_size=7)]
    outputs = [tmg.predict(predictor, rows, batch_size=7)]
    for sizes in WAYS[:2]:
        strategy = strategy_of(replicas)
        data = tmg.distribute_dataset(data_of(everything(), sizes), strategy, shares=shares)
        logs.append(evaluated(model, data))
        data = tmg.distribute_dataset(data_of((rows,), sizes), strategy, shares=shares)
        outputs.append(tmg.predict(predictor, data))
    for found in logs:
        assert_logs(found, expected)
    for found in outputs:
        np.testing.assert_array_equal(found["number"], np.arange(ROWS))
        np.testing.assert_allclose(found["size"], predicted["size"], rtol=1e-7)
    first = tmg.predict(predictor, rows, batch_size=7, steps=2)["number"]
    np.testing.assert_array_equal(first, np.arange(14))
    part = tf.nest.map_structure(lambda one: one[:14], everything())
    two_steps = evaluated(model, everything(), batch_size=7, steps=2)
    assert_logs(evaluated(model, part), two_steps)


# Fails if a penalty of frozen weights counts, which Keras leaves out, or if the losses of an
# earlier compile stay.
def test_what_is_frozen_or_compiled_anew_counts_as_in_keras() -> None:
    with strategy_of(2).scope():
        ours = build()[0]
    tmg.evaluate(ours, everything(), batch_size=ROWS)
    for change in ("frozen", "compiled"):
        plain = build()[0]
        for model in (plain, ours):
            (regularized,) = (one for one in model.layers if getattr(one, "kernel_regularizer", 0))
            regularized.trainable = False
        if change == "compiled":
            plain.compile(loss="mae", metrics={"kind": ["mse"]})
            with strategy_of(2).scope():
                ours.compile(loss="mae", metrics={"kind": ["mse"]})
        x, y, weights = everything()
        expected = plain.evaluate(
            x, y, sample_weight=weights, batch_size=ROWS, return_dict=True, verbose=0
        )
        assert_logs(evaluated(ours, everything(), batch_size=7), expected)
