"""evaluate and predict of compiled models: what one device gives, over every example, in order.

The truth is Keras on one device with all rows in one batch: its loss is then the mean over all
examples, of what masks and weights leave too. Over several batches Keras' own loss is a mean of
batch means by rows, and that of each output a plain mean of batch means, which is another number.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_pairs import KIND, ROWS, SIZE, WEIGHT, X, pair
from one_device import strategy_of
from problems import network

import tfmultigpu as tmg

LOSS = "sparse_categorical_crossentropy"


def in_one_batch(model: Any, *arrays: Any) -> dict[str, Any]:
    x, y, weight = (*arrays, None)[:3]
    return model.evaluate(x, y, sample_weight=weight, batch_size=ROWS, return_dict=True, verbose=0)


def classifier() -> Any:
    return network(5, keras.layers.Dense(3, "softmax"))


def several_outputs() -> Any:
    inputs = [keras.Input((5,), name="left"), keras.Input((5,), name="right")]
    both = keras.layers.Concatenate()(inputs)
    outputs = [keras.layers.Dense(1, name=name)(both) for name in ("b", "a")]
    return keras.Model(inputs, outputs)


def test_metrics_whose_names_depend_on_shapes_and_metrics_that_are_arrays() -> None:
    def compiled() -> dict[str, Any]:
        metrics = ["accuracy", keras.metrics.F1Score(average=None)]
        return {"loss": "categorical_crossentropy", "loss_weights": 0.5, "metrics": metrics}

    arrays = X, np.eye(3, dtype="float32")[KIND]
    model, truth = pair(2, classifier, compiled)
    expected, logs = (
        in_one_batch(truth, *arrays),
        tmg.evaluate(model, arrays, batch_size=5, return_dict=True),
    )
    assert list(logs) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
        assert isinstance(logs[name], float) or np.ndim(value), name


@pytest.mark.parametrize("replicas", [1, 2])
def test_lists_are_those_of_keras(replicas: int) -> None:
    def compiled() -> dict[str, Any]:
        return {"loss": ["mse", "mae"], "metrics": [["mae"], ["mse", "mae"]]}

    model, truth = pair(replicas, several_outputs, compiled)
    if replicas == 1:
        model.evaluate([X, X], [SIZE, SIZE], verbose=0)  # Keras then tracks losses of outputs.
    expected = truth.evaluate([X, -X], [SIZE, 2 * SIZE], batch_size=ROWS, verbose=0)
    values = tmg.evaluate(model, [X, -X], [SIZE, 2 * SIZE], batch_size=9)
    assert len(values) == 6
    assert values == pytest.approx(expected, rel=1e-5)
    model, truth = pair(replicas, classifier, lambda: {"loss": LOSS})
    value = tmg.evaluate(model, X, KIND, sample_weight=WEIGHT)
    assert value == pytest.approx(in_one_batch(truth, X, KIND, WEIGHT)["loss"], rel=1e-5)
    names = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model, truth = pair(replicas, classifier, lambda: {"loss": LOSS, **names})
    expected = truth.evaluate(X, KIND, len(X), 0, WEIGHT)
    assert tmg.evaluate(model, X, KIND, 9, 0, WEIGHT) == pytest.approx(expected, rel=1e-5)


# Predicting ---------------------------------------------------------------------------------------


class Everything(keras.Model):
    """Outputs of many types in a deep structure."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        rounded = tf.cast(tf.round(10.0 * inputs[:, 0]), tf.int32)
        return {
            "text": tf.strings.as_string(rounded),
            "numbers": [rounded, tf.cast(rounded, tf.int64)],
            "half": (tf.cast(inputs, tf.bfloat16), tf.complex(inputs[:, 0], inputs[:, 1])),
            "deep": {"truth": inputs > 0, "dense": {"last": self.dense(inputs)}},
        }


def test_keras_name_of_the_data() -> None:
    def compiled() -> dict[str, Any]:
        return {"loss": "mse", "optimizer": "sgd"}

    model, _ = pair(2, several_outputs, compiled)
    inputs, labels = [X, -X], [SIZE, 2 * SIZE]
    expected = tmg.evaluate(model, inputs, labels, verbose=0)
    assert tmg.evaluate(model, x=inputs, y=labels, verbose=0) == expected
    named, given = tmg.predict(model, x=inputs, verbose=0), tmg.predict(model, inputs, verbose=0)
    for ours, theirs in zip(named, given, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    before = model.get_weights()[0]
    tmg.fit(model, x=inputs, y=labels, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before)


def test_structures_and_types() -> None:
    with strategy_of(3).scope():
        model = Everything()
    out = tmg.predict(model, X, batch_size=5)
    assert list(out) == ["text", "numbers", "half", "deep"]
    numbers = np.round(10.0 * X[:, 0]).astype("int32")
    assert [int(text) for text in out["text"]] == numbers.tolist()
    assert [part.dtype.name for part in out["numbers"]] == ["int32", "int64"]
    for part in out["numbers"]:
        np.testing.assert_array_equal(part, numbers)
    half, waves = out["half"]
    assert half.dtype.name == "bfloat16"
    np.testing.assert_array_equal(half, X.astype(half.dtype))
    np.testing.assert_array_equal(waves, X[:, 0] + 1j * X[:, 1])
    np.testing.assert_array_equal(out["deep"]["truth"], X > 0)
    expected = X @ model.dense.kernel.numpy() + model.dense.bias.numpy()
    np.testing.assert_allclose(out["deep"]["dense"]["last"], expected, atol=1e-6)


class Noted(keras.callbacks.Callback):
    def __init__(self, stop_at: int | None) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.stop_at = stop_at

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append((batch, sorted(logs)))
        self.model.stop_evaluating = batch == self.stop_at

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append((batch, np.asarray(logs["outputs"]).shape))
        self.model.stop_predicting = batch == self.stop_at


@pytest.mark.parametrize("stop_at", [None, 1])
def test_callbacks_get_each_batch_and_can_end_a_pass(stop_at: int | None) -> None:
    model, truth = pair(2, classifier, lambda: {"loss": LOSS})
    ours, theirs = Noted(stop_at), Noted(stop_at)
    options = {"batch_size": 8, "verbose": 0}
    truth.evaluate(X, KIND, callbacks=[theirs], **options)
    loss = tmg.evaluate(model, X, KIND, callbacks=ours, **options)
    rows = ROWS if stop_at is None else 16
    assert loss == pytest.approx(in_one_batch(truth, X[:rows], KIND[:rows])["loss"], rel=1e-5)
    expected = truth.predict(X, callbacks=[theirs], **options)
    predicted = tmg.predict(model, X, callbacks=[ours], **options)
    assert ours.calls == theirs.calls
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
    assert len(predicted) == rows


# Fails if Keras' limit of steps, for debugging, leaves no logs, or if a loop runs ahead of it.
@pytest.mark.filterwarnings("ignore:Limiting steps_per_epoch")
def test_the_limit_of_steps_of_keras(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: keras.config.set_max_steps_per_epoch(None))
    keras.config.set_max_steps_per_epoch(2)
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((10, 2)), np.arange(10.0)[:, None]
    loss = tmg.evaluate(model, (x, y), batch_size=1, verbose=0)
    expected = np.mean((model(x[:2]) - y[:2]) ** 2)
    assert loss == pytest.approx(expected, rel=1e-6)
    history = tmg.fit(
        model, (x, y), batch_size=1, validation_data=(x, y), verbose=0, verify=False
    ).history
    assert history.keys() == {"loss", "val_loss"}
    assert model.optimizer.iterations.numpy() == 2
