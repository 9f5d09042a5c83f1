"""evaluate and predict of compiled models: what one device gives, over every example, in order.

The truth is Keras on one device with all rows in one batch: its loss is then the mean over all
examples, of what masks and weights leave too. Over several batches Keras' own loss is a mean of
batch means by rows, and that of each output a plain mean of batch means, which is another number.
"""

from __future__ import annotations

import gc
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import as_dataset, cut, strategy_of

import tfmultigpu as tmg

SIZES = (7, 2, 16, 1, 3, 9)
ROWS = sum(SIZES)
# How rows get to replicas, and back in order, is tried on all of these numbers; what is computed of
# them, on one replica and on several.
REPLICAS = [1, 8]
FEWER = [3]

_random = np.random.default_rng(29)
X = _random.normal(size=(ROWS, 6)).astype("float32")
KIND = _random.integers(0, 3, ROWS)
SIZE = _random.normal(size=(ROWS, 1)).astype("float32")
YES = _random.integers(0, 2, (ROWS, 1))
W = _random.uniform(0.2, 2.0, ROWS).astype("float32")
TOKENS = np.where(
    np.arange(4) < _random.integers(1, 5, (ROWS, 1)), _random.integers(1, 9, (ROWS, 4)), 0
)
TAGS = _random.integers(0, 3, (ROWS, 4))


def made(replicas, build, compiled=None):
    """The same model on one device and under a strategy, compiled alike."""
    keras.utils.set_random_seed(3)
    truth = build()
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = build()
        if compiled is not None:
            model.compile(**compiled())
    if compiled is not None:
        truth.compile(**compiled())
    model.set_weights(truth.get_weights())
    return model, truth


def in_one_batch(model, *arrays):
    x, y, weight = (*arrays, None)[:3]
    rows = len(tf.nest.flatten(x)[0])
    return model.evaluate(x, y, sample_weight=weight, batch_size=rows, return_dict=True, verbose=0)


def assert_logs(logs, expected):
    assert list(logs) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(logs[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
        assert isinstance(logs[name], float) or np.ndim(value), name


def hold(replicas, build, compiled, *arrays):
    """Evaluates on replicas in batches of several sizes, and holds that to one device."""
    model, truth = made(replicas, build, compiled)
    expected = in_one_batch(truth, *arrays)
    for batch_size in (5, 1):
        assert_logs(tmg.evaluate(model, arrays, batch_size=batch_size), expected)
    return model, truth


# Evaluating ---------------------------------------------------------------------------------------


class Sparse(keras.layers.Layer):
    """Adds a loss of its own, a mean over the batch."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(inputs)))
        return inputs


def classifier():
    moving = keras.initializers.RandomUniform(0.5, 1.5, seed=5)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.1)),
            keras.layers.BatchNormalization(
                moving_mean_initializer=moving, moving_variance_initializer=moving
            ),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(4, activity_regularizer="l2"),
            Sparse(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def classification():
    return {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
        "weighted_metrics": ["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="ce")],
    }


@pytest.mark.parametrize("replicas", FEWER)
def test_loss_and_metrics_of_all_examples(replicas):
    model, truth = hold(replicas, classifier, classification, X, KIND, W)
    assert_logs(tmg.evaluate(model, (X, KIND)), in_one_batch(truth, X, KIND))
    assert_logs(tmg.evaluate(model, (X, KIND), sample_weight=W), in_one_batch(truth, X, KIND, W))
    accuracy = model.metrics[1].metrics[0]
    assert accuracy.count.numpy() == ROWS, "the compiled metrics are the ones that counted"


def two_heads():
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    hidden = keras.layers.Concatenate()([left, right])
    regularized = keras.layers.Dense(1, kernel_regularizer="l2", name="size")(hidden)
    kind = keras.layers.Dense(3, "softmax", name="kind")(hidden)
    return keras.Model({"left": left, "right": right}, {"size": regularized, "kind": kind})


def two_losses():
    return {
        "loss": {"kind": "sparse_categorical_crossentropy", "size": keras.losses.Huber()},
        "loss_weights": {"kind": 2.0, "size": 0.5},
        "metrics": {"kind": "accuracy", "size": ["mae", keras.metrics.RootMeanSquaredError()]},
        "weighted_metrics": {"size": ["mae"]},
    }


@pytest.mark.parametrize("replicas", FEWER)
def test_several_inputs_and_outputs(replicas):
    features = {"left": X[:, :3], "right": X[:, 3:]}
    labels = {"kind": KIND, "size": SIZE}
    weights = {"kind": W, "size": W[::-1]}
    model, truth = hold(replicas, two_heads, two_losses, features, labels, weights)
    logs = tmg.evaluate(model, (features, labels))
    assert_logs(logs, in_one_batch(truth, features, labels))
    assert set(logs) >= {"loss", "kind_loss", "size_loss", "kind_accuracy", "size_weighted_mae"}


def heads_in_a_list():
    inputs = keras.Input((6,))
    outputs = [
        keras.layers.Dense(1, name="size")(inputs),
        keras.layers.Dense(3, "softmax", name="kind")(inputs),
    ]
    return keras.Model(inputs, outputs)


def test_a_list_of_losses_for_a_dict_of_outputs_goes_by_sorted_keys_as_in_keras():
    def build():
        inputs = keras.Input((6,))
        return keras.Model(
            inputs, {"b": keras.layers.Dense(1)(inputs), "a": keras.layers.Dense(1)(inputs)}
        )

    hold(2, build, lambda: {"loss": ["mae", "mse"]}, X, {"a": SIZE, "b": 3 * SIZE})


class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(3, "softmax")
        self.build((None, 6))

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)
        self.built = True

    def call(self, inputs):
        return self.first(inputs), self.second(inputs)


def test_a_subclassed_model_with_a_tuple_of_outputs():
    compiled = {
        "loss": ["mse", "sparse_categorical_crossentropy"],
        "metrics": [["mae"], ["accuracy"]],
    }
    model, truth = made(3, Pair, lambda: compiled)
    logs = tmg.evaluate(model, (X, (SIZE, KIND)), batch_size=5)
    expected = in_one_batch(truth, X, (SIZE, KIND))
    for name in ("loss", "mae", "accuracy"):
        assert logs[name] == pytest.approx(expected[name], abs=1e-6)
    # Keras names the losses of such outputs after the loss functions; here, by their place.
    assert logs["output_0_loss"] == pytest.approx(expected["mse_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("units", "activation", "labels", "metrics"),
    [
        (1, "sigmoid", YES, lambda: ["acc", keras.metrics.AUC(name="auc"), "mae"]),
        (
            3,
            "softmax",
            np.eye(3, dtype="float32")[KIND],
            lambda: ["accuracy", keras.metrics.F1Score(average=None)],
        ),
    ],
    ids=["binary", "one-hot"],
)
def test_names_that_depend_on_shapes(units, activation, labels, metrics):
    def build():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, activation)])

    def compiled():
        return {"loss": "crossentropy", "loss_weights": 0.5, "metrics": metrics()}

    hold(2, build, compiled, X, labels)


class Positive(keras.layers.Layer):
    """Adds a loss over rows to a model whose other losses go by what a mask leaves."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def call(self, inputs):
        self.add_loss(3.0 * keras.ops.mean(keras.ops.relu(inputs)))
        return inputs


def masked_heads():
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(9, 5, mask_zero=True, embeddings_regularizer="l2")(inputs)
    tag = keras.layers.Dense(3, activation="softmax")(Positive()(hidden))
    return keras.Model(inputs, {"tag": tag, "size": keras.layers.Dense(1)(hidden)})


def test_outputs_that_are_divided_by_different_weights():
    def compiled():
        tag = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
        return {"loss": {"tag": tag, "size": "mse"}, "loss_weights": {"tag": 0.5, "size": 2.0}}

    labels = {"tag": TAGS, "size": np.repeat(SIZE[:, None], 4, 1)}
    weights = {"tag": np.repeat(W[:, None], 4, 1), "size": np.repeat(W[::-1, None], 4, 1)}
    hold(3, masked_heads, compiled, TOKENS, labels, weights)


def test_where_nothing_counts_the_loss_is_the_regularisation():
    def build():
        inputs = keras.Input((6,))
        return keras.Model(inputs, keras.layers.Dense(1, kernel_regularizer="l2")(inputs))

    def compiled():
        return {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}

    model, truth = made(2, build, compiled)
    logs = tmg.evaluate(model, (X, SIZE, np.zeros(ROWS)), batch_size=5)
    assert logs == {"loss": pytest.approx(float(truth.losses[0]), rel=1e-6)}


# What data may be ---------------------------------------------------------------------------------


class InBatches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


BATCHES = cut((X, KIND, W), SIZES)
SOURCES = {
    "arrays": lambda strategy: (X, KIND, W),
    "lists": lambda strategy: (X.tolist(), KIND.tolist(), W.tolist()),
    "tensors": lambda strategy: tuple(tf.convert_to_tensor(one) for one in (X, KIND, W)),
    "dataset": lambda strategy: as_dataset(BATCHES),
    "PyDataset": lambda strategy: InBatches(BATCHES),
    "generator function": lambda strategy: lambda: iter(BATCHES),
    "distributed": lambda strategy: tmg.distribute_dataset(
        as_dataset(BATCHES), strategy, shares=(3, 1, 2)
    ),
}


@pytest.fixture(scope="module")
def classifiers():
    return made(3, classifier, classification)


def test_sources(classifiers):
    model, truth = classifiers
    expected = in_one_batch(truth, X, KIND, W)
    for name, source in SOURCES.items():
        assert_logs(tmg.evaluate(model, source(model.distribute_strategy)), expected)
        predicted = tmg.predict(model, source(model.distribute_strategy))
        np.testing.assert_allclose(predicted, truth(X, training=False), atol=1e-6, err_msg=name)


def test_steps_end_what_has_no_end(classifiers):
    model, truth = classifiers
    data = as_dataset(BATCHES).repeat()
    for what in (tmg.evaluate, tmg.predict):
        with pytest.raises(
            tmg.errors.DataError, match=r"has no end.*steps=100, or leave out \.repeat"
        ):
            what(model, data)
    first = sum(SIZES[:4])
    expected = in_one_batch(truth, X[:first], KIND[:first], W[:first])
    assert_logs(tmg.evaluate(model, data, steps=4), expected)
    assert len(tmg.predict(model, data, steps=4)) == first
    # More steps than there are batches: all of them.
    assert len(tmg.predict(model, as_dataset(BATCHES), steps=100)) == ROWS
    expected = in_one_batch(truth, X, KIND, W)
    assert_logs(tmg.evaluate(model, as_dataset(BATCHES), steps=100), expected)
    for wrong in (0, -1, 2.5):
        with pytest.raises((TypeError, ValueError), match=r"at least 1, or None\. .*: steps="):
            tmg.evaluate(model, data, steps=wrong)


def test_no_data(classifiers):
    for what in (tmg.evaluate, tmg.predict):
        for data in (as_dataset(BATCHES).take(0), (X[:0], KIND[:0])):
            with pytest.raises(tmg.errors.DataError, match="The data has no batches"):
                what(classifiers[0], data)


def test_wrong_data(classifiers):
    model, _ = classifiers
    with pytest.raises(tmg.errors.DataError, match="but the data has no labels"):
        tmg.evaluate(model, X)
    with pytest.raises(tmg.errors.DataError, match="sample_weight works only for arrays"):
        tmg.evaluate(model, as_dataset(BATCHES), sample_weight=W)
    with pytest.raises(tmg.errors.DataError, match=r"batch_size .*for arrays"):
        tmg.evaluate(model, as_dataset(BATCHES), batch_size=3)
    with pytest.raises(tmg.errors.DataError, match="An iterator can be read once"):
        tmg.predict(model, iter(BATCHES))
    other = tmg.distribute_dataset(as_dataset(BATCHES), strategy_of(2))
    with pytest.raises(
        tmg.errors.DataError, match="distributed for another strategy than that of the"
    ):
        tmg.predict(model, other)


# Predicting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", REPLICAS)
def test_every_example_once_and_in_order(replicas):
    model, truth = made(replicas, classifier)
    expected = truth.predict(X, verbose=0)
    for batch_size in (1, 5, 64):
        predicted = tmg.predict(model, X, batch_size=batch_size)
        assert isinstance(predicted, np.ndarray)
        assert predicted.dtype == np.float32
        np.testing.assert_allclose(predicted, expected, atol=1e-6)


class Everything(keras.Model):
    """Outputs of many types in a deep structure."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        rounded = tf.cast(tf.round(10.0 * inputs[:, 0]), tf.int32)
        return {
            "text": tf.strings.as_string(rounded),
            "numbers": [rounded, tf.cast(rounded, tf.int64), tf.cast(rounded + 100, tf.uint8)],
            "half": (tf.cast(inputs, tf.bfloat16), tf.cast(inputs, tf.float16)),
            "deep": {"truth": inputs > 0, "dense": {"one": self.dense(inputs)}},
            "waves": tf.complex(inputs[:, 0], inputs[:, 1]),
        }


@pytest.mark.parametrize("replicas", FEWER)
def test_structures_and_types(replicas):
    with strategy_of(replicas).scope():
        model = Everything()
    out = tmg.predict(model, X, batch_size=5)
    assert list(out) == ["text", "numbers", "half", "deep", "waves"]
    numbers = np.round(10.0 * X[:, 0]).astype("int32")
    assert [int(one) for one in out["text"]] == numbers.tolist()
    assert isinstance(out["numbers"], list)
    assert [one.dtype.name for one in out["numbers"]] == ["int32", "int64", "uint8"]
    for one, added in zip(out["numbers"], (0, 0, 100), strict=True):
        np.testing.assert_array_equal(one, (numbers + added).astype(one.dtype))
    assert isinstance(out["half"], tuple)
    assert [one.dtype.name for one in out["half"]] == ["bfloat16", "float16"]
    np.testing.assert_array_equal(out["half"][0], X.astype(out["half"][0].dtype))
    np.testing.assert_array_equal(out["half"][1], X.astype("float16"))
    np.testing.assert_array_equal(out["deep"]["truth"], X > 0)
    expected = X @ model.dense.kernel.numpy() + model.dense.bias.numpy()
    np.testing.assert_allclose(out["deep"]["dense"]["one"], expected, atol=1e-6)
    np.testing.assert_array_equal(out["waves"], X[:, 0] + 1j * X[:, 1])


def test_ragged_outputs_stay_ragged():
    class Repeat(keras.Model):
        def call(self, inputs):
            return tf.RaggedTensor.from_row_lengths(
                tf.repeat(inputs[:, 0], tf.cast(inputs[:, 1], tf.int32)),
                tf.cast(inputs[:, 1], tf.int32),
            )

    with strategy_of(3).scope():
        model = Repeat()
    lengths = np.arange(ROWS) % 4
    x = np.stack([np.arange(ROWS), lengths], axis=1).astype("float32")
    model.built = True
    out = tmg.predict(model, x, batch_size=5)
    assert out.to_list() == [[float(i)] * (i % 4) for i in range(ROWS)]


def test_a_list_of_inputs_as_in_keras():
    def build():
        inputs = [keras.Input((6,)), keras.Input((1,))]
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))

    model, truth = made(2, build, lambda: {"loss": "mse"})
    predicted = tmg.predict(model, [X, SIZE])
    np.testing.assert_allclose(predicted, truth.predict([X, SIZE], verbose=0), atol=1e-6)
    logs = tmg.evaluate(model, ([X, SIZE], SIZE), batch_size=5)
    assert_logs(logs, in_one_batch(truth, [X, SIZE], SIZE))


def test_outputs_that_do_not_fit_together():
    class Width(keras.Model):
        def call(self, inputs):
            return inputs[:, : tf.cast(tf.reduce_max(inputs), tf.int32)]

    with strategy_of(2).scope():
        model = Width()
    model.built = True
    x = np.repeat([[2.0] * 4, [3.0] * 4], 4, axis=0)
    with pytest.raises(
        tmg.errors.DataError, match=r"examples of shapes \[\(2,\), \(3,\)\]\. Pad the inputs"
    ):
        tmg.predict(model, x, batch_size=4)


def test_an_output_without_rows():
    class Mean(keras.Model):
        def call(self, inputs):
            return tf.reduce_mean(inputs)

    with strategy_of(2).scope():
        model = Mean()
    model.built = True
    with pytest.raises(tmg.errors.DataError, match=r"one value per (example|row)"):
        tmg.predict(model, X)


# Steps are kept -----------------------------------------------------------------------------------


def counting(calls):
    class Count(keras.layers.Layer):
        def call(self, inputs):
            calls.append(1)
            return inputs

    def build():
        return keras.Sequential(
            [keras.Input((6,)), Count(), keras.layers.Dense(1, kernel_regularizer="l2")]
        )

    return build


def test_a_second_call_does_not_trace_again():
    calls = []
    with strategy_of(2).scope():
        model = counting(calls)()
        model.compile(loss="mse", metrics=["mae"])
    tmg.evaluate(model, (X, SIZE), batch_size=5)
    tmg.predict(model, X, batch_size=5)
    traced = len(calls)
    first = tmg.evaluate(model, (X, SIZE), batch_size=7)
    assert len(calls) == traced
    # The weights may change, and so may the length of the data and whose it is.
    model.set_weights([2 * one for one in model.get_weights()])
    second = tmg.evaluate(model, (X[:9], SIZE[:9]), batch_size=5)
    tmg.predict(model, X[:2])
    assert len(calls) == traced
    assert second["loss"] != pytest.approx(first["loss"])


def test_compiling_and_freezing_are_noticed():
    model, truth = made(2, counting([]), lambda: {"loss": "mse", "metrics": ["mae"]})
    assert_logs(tmg.evaluate(model, (X, SIZE)), in_one_batch(truth, X, SIZE))
    for one in (model, truth):
        one.compile(loss="mae", metrics=["mse"])
    assert_logs(tmg.evaluate(model, (X, SIZE)), in_one_batch(truth, X, SIZE))
    for one in (model, truth):
        one.layers[-1].trainable = False  # Keras then leaves its regularisation out.
        one.compile(loss="mae", metrics=["mse"])
    logs = tmg.evaluate(model, (X, SIZE))
    assert_logs(logs, in_one_batch(truth, X, SIZE))
    model.layers[-1].trainable = True
    assert tmg.evaluate(model, (X, SIZE))["loss"] > logs["loss"]
    model.compile(loss="mse")
    assert set(tmg.evaluate(model, (X, SIZE))) == {"loss"}  # Keras would still say the metrics


def test_models_can_be_freed():
    with strategy_of(2).scope():
        model = counting([])()
        model.compile(loss="mse", metrics=["mae"])
    tmg.evaluate(model, (X, SIZE))
    tmg.predict(model, X)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


# Where and how a model was made -------------------------------------------------------------------


def test_not_compiled():
    model, _ = made(2, two_heads)
    with pytest.raises(
        tmg.errors.LossError, match=r"model\.compile\(loss=.*Or give loss and metrics"
    ):
        tmg.evaluate(model, ({"left": X[:, :3], "right": X[:, 3:]}, {"kind": KIND}))


def test_compiled_outside_the_scope():
    with strategy_of(2).scope():
        model = classifier()
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    assert set(tmg.evaluate(model, (X, KIND))) == {"loss", "accuracy"}  # made in the scope by us
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.compile(loss="sparse_categorical_crossentropy", metrics=[accuracy])
    with pytest.raises(tmg.ScopeError, match="The metric was created outside the scope"):
        tmg.evaluate(model, (X, KIND))


def test_created_outside_the_scope():
    model = classifier()
    with (
        strategy_of(2).scope(),
        pytest.raises(tmg.ScopeError, match="The model was created outside the scope"),
    ):
        tmg.predict(model, X)
    dense = keras.layers.Dense(1)
    dense.build((None, 6))
    with strategy_of(2).scope():
        mixed = keras.Sequential([keras.Input((6,)), dense, keras.layers.Dense(1)])
    with pytest.raises(tmg.ScopeError, match="The model was created outside the scope"):
        tmg.predict(mixed, X)


@pytest.mark.parametrize("given", [{}, {"verbose": 2}])
def test_progress_is_shown_as_keras_shows_it(capsys, given):
    model, truth = made(2, classifier, classification)
    data = tf.data.Dataset.from_tensor_slices((X[:12], KIND[:12])).batch(4)

    def shown(call):
        capsys.readouterr()
        call()
        # The last state of the bar, without times.
        last = re.split(r"[\r\x08]+", capsys.readouterr().out.rstrip())[-1].split("\n")[-1]
        words = re.sub(r"\x1b\[[0-9;]*m", "", last).split()
        return [one for one in words if one == "3/3" or one.endswith(":") or "━" in one]

    theirs = shown(lambda: truth.evaluate(data, **given))
    assert shown(lambda: tmg.evaluate(model, data, **given)) == theirs
    assert {"3/3", "loss:"} <= set(theirs)
    theirs = shown(lambda: truth.predict(data, **given))
    assert shown(lambda: tmg.predict(model, data, **given)) == theirs
    assert "3/3" in theirs
    assert shown(lambda: tmg.evaluate(model, data, verbose=0)) == []
    assert shown(lambda: tmg.predict(model, data, verbose=0)) == []


def test_what_is_no_model():
    with pytest.raises(TypeError, match="model must be a Keras model"):
        tmg.predict("model", X)
    with pytest.raises(TypeError, match=r"needs a compiled keras\.Model\. Received: Dense"):
        tmg.evaluate(keras.layers.Dense(1), (X, SIZE))


def test_losses_that_do_not_fit():
    model, _ = made(2, heads_in_a_list, lambda: {"loss": [["mse", "mae"], "ce"]})
    with pytest.raises(tmg.errors.LossError, match="An output can have only one loss"):
        tmg.evaluate(model, (X, (SIZE, KIND)))
    with strategy_of(2).scope():
        deep = Everything()
        deep.compile(loss="mse")
    with pytest.raises(tmg.errors.LossError, match="model are nested structures"):
        tmg.evaluate(deep, (X, SIZE))


def test_a_metric_that_is_no_sum():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def result(self):
            return self.value

    model, _ = made(2, classifier, lambda: {"loss": "ce", "metrics": [Largest()]})
    with pytest.raises(tmg.errors.LossError, match="largest"):
        tmg.evaluate(model, (X, KIND))
