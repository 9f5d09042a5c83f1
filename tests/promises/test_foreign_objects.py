"""Objects that this library did not make, or not whole: right, or an error with the line."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each
from law.pair import strategy_of

import tfmultigpu as tmg

layers = keras.layers
X = np.random.default_rng(3).normal(size=(7, 4)).astype("float32")
Y = X[:, :1].copy()
PAIR = (X, Y)


def dense(**options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
    return model


def in_scope(build: Callable[[], Any], replicas: int = 2) -> Any:
    with strategy_of(replicas).scope():
        return build()


# Strategies of TensorFlow -------------------------------------------------------------------------


class Theirs(tf.distribute.MirroredStrategy):
    """A strategy that create_strategy did not make, with a name of its own in messages."""


class Others(tf.distribute.MirroredStrategy):
    """Another one."""


CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda model: tmg.fit(model, X, Y, verbose=0, verify=False),
    "predict": lambda model: tmg.predict(model, X, verbose=0, verify=False),
    "make_train_step": lambda model: tmg.make_train_step(model, model.optimizer, "mse"),
    "distribute_dataset": lambda model: tmg.distribute_dataset(PAIR, batch_size=4),
    "GradientAccumulator": lambda model: tmg.GradientAccumulator(model.trainable_variables),
}


# Fails if only strategies of create_strategy count, or if one of several is guessed.
def test_a_strategy_of_tensorflow_is_not_passed_over() -> None:
    strategy, other = Theirs(["CPU:0", "CPU:1"]), Others(["CPU:0", "CPU:1"])
    outside = dense()
    before = outside.get_weights()
    for name, call in CALLS.items():
        with pytest.raises(tmg.ScopeError) as caught:
            call(outside)
        said = str(caught.value)
        assert "Theirs with 2 replica(s)" in said, name
        assert "Others with 2 replica(s)" in said, name
        assert "with strategy.scope():" in said, name
        with strategy.scope():  # The line.
            call(dense())
    np.testing.assert_array_equal(outside.get_weights()[0], before[0])
    with strategy.scope():
        model, metric = dense(), keras.metrics.MeanAbsoluteError()
    with pytest.raises(tmg.ScopeError, match="optimizer was created"):
        tmg.make_train_step(model, outside.optimizer, "mse", strategy)
    with pytest.raises(tmg.ScopeError, match="metric was created"):
        tmg.make_eval_step(model, "mse", strategy, metrics=[keras.metrics.MeanAbsoluteError()])
    tmg.make_eval_step(model, "mse", strategy, metrics=[metric])
    del other


# Fails if a strategy is taken whose replicas share one copy of each variable.
def test_replicas_that_share_a_variable_are_refused() -> None:
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with central.scope():
        model = dense()
    for call in (CALLS["fit"], lambda _: tmg.distribute_dataset(PAIR, central, batch_size=4)):
        with pytest.raises(tmg.errors.TfMultiGpuError, match=r"tmg\.create_strategy\(\)"):
            call(model)


# Objects of tf_keras, a stand-in ------------------------------------------------------------------


class Legacy:
    """An object as tf_keras has it: models, optimizers, losses and metrics alike."""

    name, variables, trainable_variables, weights, built = "legacy", (), (), (), True
    reduction = "sum_over_batch_size"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.0


Legacy.__module__ = "tf_keras.src.engine"


class Heir(Legacy):
    """A subclass in a user's own module."""


def holding() -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.hidden = Legacy()
    return model


def compiled(**options: Any) -> Any:
    return tmg.evaluate(dense(**options), X, Y, verbose=0)


OLD, SGD = Legacy(), keras.optimizers.SGD
ENTRIES: dict[str, Callable[[], Any]] = {
    "fit": lambda: tmg.fit(OLD, X, Y),
    "evaluate": lambda: tmg.evaluate(Heir(), X, Y),
    "predict": lambda: tmg.predict(OLD, X),
    "prepare": lambda: tmg.prepare(OLD),
    "callback": lambda: tmg.fit(dense(), X, Y, callbacks=[OLD]),
    "model": lambda: tmg.make_train_step(OLD, SGD(), "mse"),
    "optimizer": lambda: tmg.make_train_step(dense(), OLD, "mse"),
    "loss": lambda: tmg.make_train_step(dense(), SGD(), {"a": Heir()}),
    "loss in an objective": lambda: tmg.make_eval_step(dense(), tmg.steps.Objective(OLD)),
    "metric": lambda: tmg.make_eval_step(dense(), "mse", metrics=[OLD]),
    "predict step": lambda: tmg.make_predict_step(OLD),
    "attribute of a model": lambda: tmg.make_predict_step(holding()),
    "compiled loss": lambda: compiled(loss=OLD),
    "compiled metric": lambda: compiled(metrics=[OLD]),
    "loss_sum": lambda: tmg.loss_sum(OLD, Y, Y),
    "update": lambda: tmg.apply_reduced_gradients(OLD, [tf.ones([1])], [tf.Variable([1.0])]),
    "accumulator": lambda: tmg.GradientAccumulator(OLD),
    "checkpoints": lambda: tmg.Checkpoints("nowhere", model=OLD, optimizer=OLD),
    "explain": lambda: tmg.explain(OLD, strategy=strategy_of(2)),
    "norm": lambda: tmg.synchronize_batch_norm(OLD),
    "testing": lambda: tmg.testing.assert_replica_invariant(
        lambda: tmg.testing.Training(OLD, OLD, OLD), [PAIR]
    ),
}


# Fails if an entry takes an object of Keras 2, or blames something else for it.
@each("entry", ENTRIES)
def test_tf_keras_is_named(entry: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tf_keras", types.ModuleType("tf_keras"))
        with strategy_of(1).scope(), pytest.raises(tmg.errors.TfMultiGpuError) as caught:
            ENTRIES[entry]()
    said = str(caught.value)
    assert "tf_keras is Keras 2" in said
    assert "Write import keras" in said
    assert "TF_USE_LEGACY_KERAS" in said


# Models that are built in part --------------------------------------------------------------------


class Inner(layers.Layer):
    """A layer without build, so that whoever builds its parent does not build its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = layers.Dense(3), layers.Dropout(0.4), layers.Dense(4)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.second(self.drop(self.first(x), training=training))


class Partly(keras.Model):
    """Has variables before it is built: of a Dropout, and of a layer that is built early."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.inner, self.last = layers.Dropout(0.3), Inner(), layers.Dense(1)
        self.passed_over = layers.Dense(2)
        self.last.build((None, 4))

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.inner(self.drop(x, training=training), training=training))


def partly(marked: bool) -> Any:
    keras.utils.set_random_seed(2)
    model = Partly()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    if marked:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says what comes of it.
            model.build((None, 4))
    return model


# Fails if a layer that model.build has left out is built outside the scope, or later, or not.
def test_a_model_that_is_built_in_part_is_built_whole() -> None:
    truth = partly(marked=False)
    options = {"batch_size": 3, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="unbuilt state"):  # Of the layer that is passed over.
        truth.fit(X, Y, **options)
    model = in_scope(lambda: partly(marked=True))
    tmg.fit(model, X, Y, verify=False, **options)
    assert [variable.name for variable in model.variables] == [v.name for v in truth.variables]
    for mine, value in zip(model.variables, truth.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), value.numpy(), rtol=2e-5, atol=1e-6)
    assert not model.passed_over.built
    built = in_scope(lambda: partly(marked=True))
    with strategy_of(2).scope():  # Before the other layers have variables.
        built.optimizer.build(built.trainable_variables)
    with pytest.raises(tmg.ScopeError, match=r"built for other variables.*Create a new one"):
        tmg.fit(built, X, Y, **options)


# Outputs other than dense rows --------------------------------------------------------------------


class Rows(keras.Model):
    """Returns ragged rows, sparse ones of them, and two dense rows for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        values = self.dense(x)
        lengths = tf.cast(tf.abs(x[:, 0]) * 10.0, tf.int64) % 4
        ragged = tf.RaggedTensor.from_tensor(values, lengths)
        return {"ragged": ragged, "sparse": ragged.to_sparse(), "twice": tf.repeat(values, 2, 0)}


def comparable(outputs: Any) -> dict[str, Any]:
    sparse = tf.sparse.to_dense(outputs["sparse"]).numpy()
    ragged = outputs["ragged"].to_tensor(-1.0, shape=[None, 3]).numpy()
    return {"sparse": sparse, "ragged": ragged, "twice": np.asarray(outputs["twice"])}


# Fails if rows of replicas are lost, doubled or mixed in outputs that are not dense.
@each(("replicas", "size", "verify"), [(2, 4, "first"), (3, 2, False)])
def test_sparse_and_ragged_outputs(replicas: int, size: int, verify: Any) -> None:
    model = in_scope(Rows, replicas)
    ours = comparable(tmg.predict(model, X, batch_size=size, verbose=0, verify=verify))
    for name, expected in comparable(Rows()(X)).items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-6, err_msg=name)


class Mean(Rows):
    """Returns one value for a batch."""

    def call(self, x: Any) -> Any:
        return tf.reduce_mean(self.dense(x))


# Fails if one value for a batch is joined over replicas, or TensorFlow's words come through.
@each("replicas", [1, 2])
def test_one_value_for_a_batch_is_no_prediction(replicas: int) -> None:
    with pytest.raises(tmg.errors.DataError, match=r"Return one value (per|for each) example"):
        tmg.predict(in_scope(Mean, replicas), X, verbose=0)


# What Keras and TensorFlow take -------------------------------------------------------------------


# Fails if another crossentropy is taken than model.compile takes for these shapes.
@each(
    ("labels", "shape"),
    [([[1.0], [0.0]], (2, 1)), ([1, 2], (2, 3)), ([[1], [2]], (2, 3)),
     ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], (2, 3))],
)  # fmt: skip
def test_the_loss_crossentropy_is_that_of_keras(labels: Any, shape: tuple[int, ...]) -> None:
    predictions = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]], "float32")[:, : shape[1]]
    model = keras.Sequential([keras.Input((shape[1],)), layers.Activation("linear")])
    model.compile(loss="crossentropy")
    expected = model.evaluate(predictions, np.array(labels), verbose=0)
    for name in ("crossentropy", "CE"):
        pair = tmg.loss_sum(name, np.array(labels), predictions)
        np.testing.assert_allclose(pair.sum / pair.weight, expected, rtol=1e-6)


# Fails if a loop that asks for the next batch, as with TensorFlow's iterators, loses one.
def test_the_next_batch_as_an_optional() -> None:
    strategy = strategy_of(2)
    data = tmg.distribute_dataset(X, strategy, batch_size=3)

    @tf.function
    def total(iterator: Any) -> Any:
        added = tf.zeros([4])
        batch = iterator.get_next_as_optional()
        while batch.has_value():
            sums = strategy.run(lambda x: tf.reduce_sum(x, 0), args=(batch.get_value(),))
            added += strategy.reduce("SUM", sums, axis=None)
            batch = iterator.get_next_as_optional()
        return added

    np.testing.assert_allclose(total(iter(data)), X.sum(0), rtol=1e-5)


# Mistakes whose line is run -----------------------------------------------------------------------


# Fails if the message for an iterator of TensorFlow advises what was written.
def test_an_iterator_of_tensorflow_is_named() -> None:
    strategy = strategy_of(2)
    model = in_scope(dense)
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy, verify=False)
    dataset = tf.data.Dataset.from_tensor_slices(PAIR).batch(4)
    theirs = iter(strategy.experimental_distribute_dataset(dataset))
    in_function = tf.function(lambda iterator: step(next(iterator)))
    for call in (lambda it: step.run(it, 2), in_function):
        with pytest.raises(tmg.errors.DataError) as caught:
            call(theirs)
        assert "TensorFlow's own" in " ".join(str(caught.value).split())
        assert "iter(tmg.distribute_dataset(dataset, strategy))" in str(caught.value)
        iterator = iter(tmg.distribute_dataset(dataset, strategy))  # The line.
        call(iterator)
    assert int(model.optimizer.iterations.numpy()) == 3


# Fails if a loss of an unknown number of axes is told to batch its data.
def test_tf_squeeze_without_an_axis_is_named() -> None:
    model = in_scope(dense)

    def train(**axis: int) -> Any:
        def loss(a: Any, b: Any) -> Any:
            return tf.square(tf.squeeze(a, **axis) - tf.squeeze(b, **axis))

        return tmg.make_train_step(model, model.optimizer, loss, strategy_of(2), verify=False)(PAIR)

    with pytest.raises(ValueError, match="shape") as caught:  # Keras raises a plain one.
        train()
    for said in ("labels of shape (None, 1)", "predictions of shape (None, 1)", "axis=-1"):
        assert said in str(caught.value)
    assert not hasattr(caught.value, "__notes__")
    assert float(train(axis=-1)["weight"]) == len(X)


# Fails if the line for ragged rows gives other widths on each replica.
def test_ragged_rows_are_gathered_at_one_width() -> None:
    model = in_scope(dense)
    ragged = tf.ragged.constant([[1.0], [2.0], [3.0, 4.0], [5.0]])

    def train(rows: Callable[[Any], Any]) -> Any:
        def forward(model: Any, batch: Any, training: bool) -> Any:
            z = model(batch[0], training=training)
            gathered = tf.reduce_sum(tmg.gather_rows(rows(batch[1])))
            return tmg.LossSum(
                tf.reduce_sum(z**2) + 0 * tf.reduce_sum(z) * gathered, tf.shape(z)[0]
            )

        step = tmg.make_train_step(
            model, model.optimizer, None, strategy_of(2), forward=forward, verify=False
        )
        return step((X[:4], ragged))

    line = r"value\.to_tensor\(shape=\[None, 100\]\)"
    for rows in (lambda value: value, lambda value: value.to_tensor()):
        with pytest.raises((tmg.errors.LossError, tf.errors.InvalidArgumentError), match=line):
            train(rows)
    train(lambda value: value.to_tensor(shape=[None, 100]))


# Fails if more devices are advised for a variable that fits on none of them.
def test_a_variable_larger_than_every_device() -> None:
    memory = {"CPU:0": 8e4, "CPU:1": 8e4}

    def build(widths: tuple[int, ...]) -> Any:
        x = keras.Input((100,))
        parts = [layers.Dense(width, name=f"big_{i}")(x) for i, width in enumerate(widths)]
        return keras.Model(x, keras.ops.concatenate(parts, axis=-1) if widths[1:] else parts[0])

    with strategy_of(2).scope(), tmg.sharded_variables(memory=memory, at_least=0):
        with pytest.raises(tmg.errors.DataError) as caught:
            build((300,))
        assert "'big_0/kernel'" in str(caught.value)
        assert "more devices" not in str(caught.value)
        assert "keras.ops.concatenate(parts, axis=-1)" in str(caught.value)
        assert build((150, 150)).output_shape == (None, 300)  # The line.


def counted(count: Callable[[Any], Any]) -> Any:
    """Adds the rows of a distributed dataset in a tf.function, as ``count`` loops over it."""
    strategy = strategy_of(2)
    data = tmg.distribute_dataset(X, strategy, batch_size=4)

    def rows(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(lambda x: tf.shape(x)[0], (batch,)), axis=None)

    return tf.function(lambda: count(data, rows))()


def by_enumerate(data: Any, rows: Callable[[Any], Any]) -> Any:
    total = tf.zeros([], tf.int32)
    for _, batch in enumerate(data):
        total += rows(batch)
    return total


def by_for(data: Any, rows: Callable[[Any], Any]) -> Any:
    total = tf.zeros([], tf.int32)
    for batch in data:
        total += rows(batch)
    return total


@functools.cache
def shared() -> Any:
    return in_scope(dense)


# The mistake, what its message says, and the line of the message.
LINES: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "a list of arrays": (
        lambda: tmg.fit(shared(), [X, Y], verbose=0),
        "A list is several inputs, as in Keras. Give a tuple, (x, y)",
        lambda: tmg.fit(shared(), (X, Y), verbose=0, verify=False),
    ),
    "another case": (
        lambda: tmg.plan_strategy(communication="NCCL"),  # type: ignore[arg-type]
        'Write communication="nccl".',
        lambda: tmg.plan_strategy(communication="nccl"),
    ),
    "enumerate in a tf.function": (
        lambda: counted(by_enumerate),
        "Write for batch in data, and count with a tensor",
        lambda: counted(by_for),
    ),
    "Keras' own fit": (
        lambda: shared().fit(tmg.distribute_dataset(PAIR, strategy_of(2), batch_size=4)),
        "write tmg.fit(model, data)",
        lambda: tmg.fit(
            shared(),
            tmg.distribute_dataset(PAIR, strategy_of(2), batch_size=4),
            verbose=0,
            verify=False,
        ),
    ),
}


# Fails if the message does not know the mistake, or its line is wrong.
@each("mistake", LINES)
def test_the_line_of_the_message_is_right(mistake: str) -> None:
    wrong, said, line = LINES[mistake]
    with pytest.raises(ValueError, match=r"Received|x=") as caught:
        wrong()
    assert said in " ".join(str(caught.value).split())
    line()


# Fails if a model that was compiled with run_eagerly=True is not told why it has no values.
def test_a_loss_that_needs_values_is_told_what_to_write() -> None:
    def loss(y_true: Any, y_pred: Any) -> Any:
        y_pred.numpy()
        return tf.square(y_true - y_pred)

    model = in_scope(lambda: dense(loss=loss, run_eagerly=True))
    with pytest.raises(AttributeError, match="numpy") as caught:
        tmg.fit(model, X, Y, verbose=0)
    assert "tf.print(x), or tf.py_function" in str(getattr(caught.value, "__notes__", ()))


class Task(keras.Model):
    """As a task of KerasHub: its own fit preprocesses what the data has."""

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        return x, y

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not ours")


class Steps(keras.Model):
    """Predicts by a step of its own."""

    def predict_step(self, data: Any) -> Any:
        return 2.0 * self(data)


class Predictor(keras.Model):
    """The line: a model around the other one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def call(self, x: Any) -> Any:
        return 2.0 * self.model(x, training=False)


# Fails if the advice for methods of a model of one's own cannot be followed.
def test_models_with_methods_of_their_own() -> None:
    def build(kind: Any) -> Any:
        x = keras.Input((4,))
        model = kind(x, layers.Dense(1, kernel_initializer="ones")(x))
        model.compile("sgd", "mse")
        return model

    task = in_scope(lambda: build(Task))
    with pytest.raises(tmg.errors.LossError, match=r"data\.map\(task\.preprocessor\)"):
        tmg.prepare(task)
    data = tf.data.Dataset.from_tensor_slices(PAIR).batch(4).map(lambda x, y: (x, y))
    tmg.fit(task, data, verbose=0, verify=False)  # The line.
    model = in_scope(lambda: build(Steps))
    with pytest.raises(tmg.errors.LossError, match=r"predictor = Predictor\(model\)"):
        tmg.predict(model, X)
    predictor = in_scope(lambda: Predictor(model))  # The line.
    expected = 2.0 * X.sum(1, keepdims=True)
    np.testing.assert_allclose(tmg.predict(predictor, X, verbose=0), expected, rtol=1e-5)


class Detector(keras.Model):
    """Computes its whole loss by itself, with loss objects of Keras and its own penalties."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1, kernel_regularizer="l2", activity_regularizer="l1")
        self.mse = keras.losses.MeanSquaredError()

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        return 2.0 * (super().compute_loss(x, y, y_pred) + self.mse(y, y_pred))

    def compute(self, batch: Any, training: bool) -> Any:
        x, y = batch
        rows = tf.cast(tf.shape(x)[0], tf.float32)
        loss = self.compute_loss(x, y, self(x, training=training))
        return tmg.LossSum(loss * rows, rows)


# Fails if a step divides the mean of a Keras loss object by the replicas, as Keras does for loops
# that add gradients, or adds penalties to a compute_loss that has them.
def test_a_compute_loss_with_loss_objects_trains_as_in_keras() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        model = Detector()
        model(X)
        model.compile(keras.optimizers.SGD(0.1), "mae")
        return model

    plain = build()
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, Y, **options).history
    with strategy_of(2).scope():
        ours = build()
    history = tmg.fit(ours, X, Y, forward=Detector.compute, **options).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-6)
    for weight, truth in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, truth, rtol=1e-6)
