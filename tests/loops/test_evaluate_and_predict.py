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
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg

SIZES = (7, 2, 16, 1, 3, 9)
ROWS = sum(SIZES)

_random = np.random.default_rng(29)
X = _random.normal(size=(ROWS, 6)).astype("float32")
KIND = _random.integers(0, 3, ROWS)
SIZE = _random.normal(size=(ROWS, 1)).astype("float32")
W = _random.uniform(0.2, 2.0, ROWS).astype("float32")


def made(replicas: int, build: Any, compiled: Any = None) -> tuple[Any, Any]:
    """Returns the same model under a strategy and on one device, compiled alike."""
    keras.utils.set_random_seed(3)
    truth = build()
    with strategy_of(replicas).scope():
        model = build()
        if compiled is not None:
            model.compile(**compiled())
    if compiled is not None:
        truth.compile(**compiled())
    model.set_weights(truth.get_weights())
    return model, truth


def in_one_batch(model: Any, *arrays: Any) -> dict[str, Any]:
    x, y, weight = (*arrays, None)[:3]
    rows = len(tf.nest.flatten(x)[0])
    return model.evaluate(x, y, sample_weight=weight, batch_size=rows, return_dict=True, verbose=0)


def assert_logs(logs: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(logs) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
        assert isinstance(logs[name], float) or np.ndim(value), name


def hold(replicas: int, build: Any, compiled: Any, *arrays: Any) -> tuple[Any, Any]:
    """Evaluates on replicas in batches of several sizes, and holds that to one device."""
    model, truth = made(replicas, build, compiled)
    expected = in_one_batch(truth, *arrays)
    for batch_size in (5, 1):
        logs = tmg.evaluate(model, arrays, batch_size=batch_size, verbose=0)
        assert_logs(logs, expected)
    return model, truth


# Evaluating ---------------------------------------------------------------------------------------


def classifier() -> Any:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])


def classification() -> dict[str, Any]:
    return {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


def test_a_list_of_losses_for_a_dict_of_outputs_goes_by_sorted_keys_as_in_keras() -> None:
    def build() -> Any:
        inputs = keras.Input((6,))
        dense = keras.layers.Dense
        return keras.Model(inputs, {"b": dense(1)(inputs), "a": dense(1)(inputs)})

    hold(2, build, lambda: {"loss": ["mae", "mse"]}, X, {"a": SIZE, "b": 3 * SIZE})


def test_metrics_whose_names_depend_on_shapes_and_metrics_that_are_arrays() -> None:
    def build() -> Any:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])

    def compiled() -> dict[str, Any]:
        metrics = ["accuracy", keras.metrics.F1Score(average=None)]
        return {"loss": "categorical_crossentropy", "loss_weights": 0.5, "metrics": metrics}

    hold(2, build, compiled, X, np.eye(3, dtype="float32")[KIND])


def several_outputs() -> Any:
    inputs = [keras.Input((6,), name="left"), keras.Input((6,), name="right")]
    both = keras.layers.Concatenate()(inputs)
    outputs = [keras.layers.Dense(1, name=name)(both) for name in ("b", "a")]
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("replicas", [1, 2])
def test_lists_are_those_of_keras(replicas: int) -> None:
    def compiled() -> dict[str, Any]:
        return {"loss": ["mse", "mae"], "metrics": [["mae"], ["mse", "mae"]]}

    model, truth = made(replicas, several_outputs, compiled)
    if replicas == 1:
        model.evaluate([X, X], [SIZE, SIZE], verbose=0)  # Keras then tracks losses of outputs.
    expected = truth.evaluate([X, -X], [SIZE, 2 * SIZE], batch_size=ROWS, verbose=0)
    values = tmg.evaluate(model, [X, -X], [SIZE, 2 * SIZE], return_dict=False, batch_size=9)
    assert len(values) == 6
    assert values == pytest.approx(expected, rel=1e-5)
    model, truth = made(replicas, classifier, lambda: {"loss": "sparse_categorical_crossentropy"})
    value = tmg.evaluate(model, x=X, y=KIND, sample_weight=W, return_dict=False)
    assert value == pytest.approx(in_one_batch(truth, X, KIND, W)["loss"], rel=1e-5)


# Data ---------------------------------------------------------------------------------------------


class InBatches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return len(BATCHES)

    def __getitem__(self, index: int) -> Any:
        return BATCHES[index]


BATCHES = cut((X, KIND, W), SIZES)
SOURCES: dict[str, Any] = {
    "lists": (X.tolist(), KIND.tolist(), W.tolist()),
    "tensors": tuple(tf.convert_to_tensor(array) for array in (X, KIND, W)),
    "PyDataset": InBatches(),
    "generator function": lambda: iter(BATCHES),
}


@pytest.fixture(scope="module")
def classifiers() -> tuple[Any, Any]:
    return made(3, classifier, classification)


def test_sources(classifiers: Any) -> None:
    model, truth = classifiers
    expected = in_one_batch(truth, X, KIND, W)
    for name, source in SOURCES.items():
        assert_logs(tmg.evaluate(model, source, verbose=0), expected)
        predicted = tmg.predict(model, source, verbose=0)
        np.testing.assert_allclose(predicted, truth(X, training=False), atol=1e-6, err_msg=name)


def test_steps_end_what_has_no_end(classifiers: Any) -> None:
    model, truth = classifiers
    data, first = as_dataset(BATCHES).repeat(), sum(SIZES[:4])
    expected = in_one_batch(truth, X[:first], KIND[:first], W[:first])
    assert_logs(tmg.evaluate(model, data, steps=4), expected)
    assert len(tmg.predict(model, data, steps=4)) == first
    # More steps than there are batches: all of them.
    assert len(tmg.predict(model, as_dataset(BATCHES), steps=100)) == ROWS
    expected = in_one_batch(truth, X, KIND, W)
    assert_logs(tmg.evaluate(model, as_dataset(BATCHES), steps=100), expected)


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


class Of(keras.Model):
    """Computes its outputs by a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.built = function, True

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)


def of(function: Any, replicas: int = 2) -> Any:
    with strategy_of(replicas).scope():
        return Of(function)


def test_ragged_outputs_stay_ragged() -> None:
    def repeated(inputs: Any) -> Any:
        lengths = tf.cast(inputs[:, 1], tf.int32)
        return tf.RaggedTensor.from_row_lengths(tf.repeat(inputs[:, 0], lengths), lengths)

    x = np.stack([np.arange(ROWS), np.arange(ROWS) % 4], axis=1).astype("float32")
    out = tmg.predict(of(repeated, 3), x, batch_size=5)
    assert out.to_list() == [[float(i)] * (i % 4) for i in range(ROWS)]


def test_outputs_that_make_no_array_are_told() -> None:
    def cut_off(inputs: Any) -> Any:
        return inputs[:, : tf.cast(tf.reduce_max(inputs), tf.int32)]

    x = np.repeat([[2.0] * 4, [3.0] * 4], 4, axis=0)
    words = r"examples of shapes \[\(2,\), \(3,\)\]\. Return .*pad the inputs"
    with pytest.raises(tmg.errors.DataError, match=words):
        tmg.predict(of(cut_off), x, batch_size=4)


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
    model, truth = made(2, classifier, lambda: {"loss": "sparse_categorical_crossentropy"})
    ours, theirs = Noted(stop_at), Noted(stop_at)
    options = {"batch_size": 8, "verbose": 0}
    truth.evaluate(X, KIND, callbacks=[theirs], **options)
    logs = tmg.evaluate(model, X, KIND, callbacks=ours, **options)
    rows = ROWS if stop_at is None else 16
    assert_logs(logs, in_one_batch(truth, X[:rows], KIND[:rows]))
    expected = truth.predict(X, callbacks=[theirs], **options)
    predicted = tmg.predict(model, x=X, callbacks=[ours], **options)
    assert ours.calls == theirs.calls
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
    assert len(predicted) == rows


# What is refused ----------------------------------------------------------------------------------


def test_wrong_data(classifiers: Any) -> None:
    model, _ = classifiers
    dataset, other = (
        as_dataset(BATCHES),
        tmg.distribute_dataset(as_dataset(BATCHES), strategy_of(2)),
    )
    every: list[Any] = [
        (tmg.evaluate, dataset.repeat(), {}, r"has no end.*steps=100, or leave out \.repeat"),
        (tmg.predict, dataset.repeat(), {}, r"has no end.*steps=100, or leave out \.repeat"),
        (tmg.predict, dataset.take(0), {}, "The data has no batches"),
        (tmg.evaluate, (X[:0], KIND[:0]), {}, "The data has no batches"),
        (tmg.predict, X[:0], {}, "The data has no batches"),
        (tmg.evaluate, dataset, {"sample_weight": W}, "sample_weight works only for arrays"),
        (tmg.evaluate, dataset, {"batch_size": 3}, r"batch_size=3"),
        (tmg.predict, iter(BATCHES), {}, "An iterator can be read once"),
        (tmg.predict, other, {}, "distributed for another strategy than that of the"),
    ]
    for call, data, options, words in every:
        with pytest.raises(tmg.errors.DataError, match=words):
            call(model, data, **options)
    for steps in (0, -1, 2.5):
        with pytest.raises((TypeError, ValueError), match=r"at least 1, or None\. .*: steps="):
            tmg.evaluate(model, dataset, steps=steps)
    with pytest.raises(TypeError, match=r"Received: data beside x\. Write tmg\.evaluate\("):
        tmg.evaluate(model, X, KIND, x=X)
    with pytest.raises(TypeError, match=r"Received: none\. Write tmg\.predict\("):
        tmg.predict(model)


def test_wrong_models() -> None:
    model, _ = made(2, several_outputs)
    with pytest.raises(tmg.errors.LossError, match=r"model\.compile\(loss=.*Or give loss and met"):
        tmg.evaluate(model, ([X, X], [SIZE, SIZE]))
    for call in (tmg.evaluate, tmg.predict):
        with pytest.raises(TypeError, match=r"needs a keras\.Model.*Dense.*keras\.Sequential\("):
            call(keras.layers.Dense(1), (X, SIZE))
    with strategy_of(2).scope():
        deep = Everything()
        deep.compile(loss="mse")
    with pytest.raises(tmg.errors.LossError, match="The model has 4 outputs"):
        tmg.evaluate(deep, (X, SIZE))


def test_what_was_created_outside_the_scope() -> None:
    with strategy_of(2).scope():
        model = classifier()
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    assert set(tmg.evaluate(model, (X, KIND))) == {"loss", "accuracy"}  # Made in the scope by us.
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.compile(loss="sparse_categorical_crossentropy", metrics=[accuracy])
    with pytest.raises(tmg.ScopeError, match="The metric was created outside the scope"):
        tmg.evaluate(model, (X, KIND))
    dense = keras.layers.Dense(1)
    dense.build((None, 6))
    with strategy_of(2).scope():
        mixed = keras.Sequential([keras.Input((6,)), dense, keras.layers.Dense(1)])
    with pytest.raises(tmg.ScopeError, match="The model was created outside the scope"):
        tmg.predict(mixed, X)


def test_a_metric_that_is_not_a_sum() -> None:
    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.value

    loss = "sparse_categorical_crossentropy"
    model, _ = made(2, classifier, lambda: {"loss": loss, "metrics": [Largest()]})
    told = r"the state 'largest/value' is .*Of a metric keep sums"
    with pytest.warns(tmg.ReplicaDependenceWarning, match=told):
        tmg.evaluate(model, (X, KIND))
