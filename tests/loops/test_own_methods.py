"""Models that replace methods of Keras: as in Keras on one replica, and the lines for several."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

# NumPy 2 about TensorFlow's variables, which Keras reads as arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ROWS = 37
_random = np.random.default_rng(17)
X = _random.normal(size=(ROWS, 5))  # float64, which Keras casts
Y = _random.normal(size=(ROWS, 1))
W = _random.uniform(0.2, 2.0, ROWS)
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


class Base(keras.Model):
    """Two layers, one of which draws; the classes below replace methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))
        self.drop = keras.layers.Dropout(0.3, seed=4)
        self.outer = keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.outer(self.drop(self.inner(x), training=training))


class OwnStep(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def train_step(self, data: Any) -> Any:
        x, y, *weight = data
        with tf.GradientTape() as tape:
            values = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            loss = tf.reduce_mean(values * weight[0] if weight else values)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.seen.update_state(values)
        return {"loss": loss, "seen": self.seen.result(), "both": {"rows": tf.shape(x)[0]}}

    def test_step(self, data: Any) -> Any:
        x, y = data[:2]
        self.seen.update_state(tf.abs(y - self(x)))
        return {"seen": self.seen.result()}


class OwnMetrics(Base):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "largest": tf.reduce_max(y_pred)}


class OwnResults(Base):
    def get_metrics_result(self) -> Any:
        return {**super().get_metrics_result(), "more": 1.0}


class OwnLoss(Base):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        counted = tf.cast(y > 0, y_pred.dtype)
        values = tf.square(y - y_pred) * counted
        return tf.reduce_sum(values) / tf.maximum(tf.reduce_sum(counted), 1.0)


class RowLoss(Base):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


class OnlySuper(Base):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnPredict(Base):
    def predict_step(self, data: Any) -> Any:
        return {"doubled": 2 * super().predict_step(data), "row": tf.range(tf.shape(data)[0])}


def compiled(kind: Any, scope: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    with scope or contextlib.nullcontext():
        model = kind()
        # Metrics that are compiled but never updated make Keras' own fit fail.
        metrics = None if kind is OwnStep else ["mae"]
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=metrics, **options)
    return model


def assert_equal(model: Any, truth: Any, history: Any, expected: Any) -> None:
    for one, other in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert history.history == expected.history
    assert int(model.optimizer.iterations.numpy()) == int(truth.optimizer.iterations.numpy())


# One replica --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mirrored"),
    [(OwnStep, True), (OwnStep, False), (OwnMetrics, False), (OwnResults, False),
     (OwnLoss, True), (RowLoss, False), (OnlySuper, False)],
)  # fmt: skip
def test_fit_and_evaluate_are_those_of_keras_to_the_last_bit(kind: Any, mirrored: bool) -> None:
    """Whatever a call takes, with weights, validation and hooks of each batch."""
    scope = tf.distribute.MirroredStrategy(["CPU:0"]).scope() if mirrored else None
    model, truth = compiled(kind, scope), compiled(kind)
    seen: dict[int, list[Any]] = {id(model): [], id(truth): []}

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen[id(self.model)].append((batch, *sorted(logs.items())))

    options = {**FIT, "sample_weight": W, "validation_data": (X[:11], Y[:11])}
    expected = truth.fit(X, Y, callbacks=[Watch()], validation_batch_size=4, **options)
    history = tmg.fit(model, X, Y, callbacks=[Watch()], validation_batch_size=4, **options)
    assert_equal(model, truth, history, expected)
    assert seen[id(model)] == seen[id(truth)] != []
    options = {"batch_size": 8, "verbose": 0}
    logs = truth.evaluate(X, Y, return_dict=True, **options)
    tolerance = 1e-6 if kind is OnlySuper else 0.0  # Its evaluation is ours.
    assert tmg.evaluate(model, (X, Y), **options) == pytest.approx(logs, rel=tolerance, abs=0)
    arrays = X.astype("float32"), Y.astype("float32")
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(8)
    options = {"shuffle": False, "verbose": 0}
    assert_equal(model, truth, tmg.fit(model, data, **options), truth.fit(data, **options))


def test_predict_is_that_of_keras() -> None:
    model, truth = compiled(OwnPredict), compiled(OwnPredict)
    model(X[:1])
    truth(X[:1])
    model.set_weights(truth.get_weights())
    expected = truth.predict(X, batch_size=8, verbose=0)
    predicted = tmg.predict(model, X, batch_size=8, verbose=0)
    assert set(predicted) == {"doubled", "row"}
    for name, values in expected.items():
        np.testing.assert_array_equal(predicted[name], values)


def test_what_acts_in_our_step_or_resumes_it_is_refused(tmp_path: Path) -> None:
    model = compiled(OwnStep)
    options = {"micro_batches": 2, "clip_norm": 1.0, "loss_scale": 8, "shard_update": True}
    for name, value in options.items():
        with pytest.raises(ValueError, match=rf"^{name} acts in the step of this library.*OwnStep"):
            tmg.fit(model, X, Y, **{name: value}, **FIT)
    callback = tmg.Checkpoints(tmp_path, model, model.optimizer).callback()
    with pytest.raises(tmg.errors.LossError, match=r"OwnStep\..*keras\.callbacks\.BackupAndRest"):
        tmg.fit(model, X, Y, callbacks=[callback], **FIT)
    assert not int(model.optimizer.iterations.numpy())
    model(X[:1])  # That of Keras needs a model that is built.
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    tmg.fit(model, X, Y, callbacks=[backup], **FIT)
    assert int(model.optimizer.iterations.numpy()) == 10


@pytest.mark.parametrize("purpose", ["train", "test", "predict"])
def test_a_loop_of_its_own_is_not_passed_over(purpose: str) -> None:
    name = f"make_{purpose}_function"
    model = compiled(type("Own", (Base,), {name: lambda self, force=False: None}))
    calls: dict[str, Any] = {
        "train": lambda: tmg.fit(model, X, Y, **FIT),
        "test": lambda: tmg.evaluate(model, X, Y),
        "predict": lambda: tmg.predict(model, X),
    }
    with pytest.raises(tmg.errors.LossError, match=rf"Own\.{name}\. Write .* {purpose}_step"):
        calls[purpose]()


# Several replicas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (OwnStep, "fit", r"OwnStep\.train_step, and MirroredStrategy with 2 replica.*"
         r"def forward\(model, batch, training\):.*tmg\.LossSum\(.*forward=forward\).*chain_steps"),
        (OwnLoss, "fit", r"OwnLoss\.compute_loss.*return tmg\.LossSum\("),
        (RowLoss, "fit", r"RowLoss\.compute_loss.*return tmg\.LossSum\("),
        (OwnMetrics, "fit", r"OwnMetrics\.compute_metrics.*model\.compile\(metrics="),
        (OwnResults, "fit", r"OwnResults\.get_metrics_result.*model\.compile\(metrics="),
        (OnlySuper, "fit", r"OnlySuper\.train_step"),
        (OwnStep, "evaluate", r"OwnStep\.test_step.*make_eval_step\(model, None"),
        (OwnPredict, "predict", r"OwnPredict\.predict_step.*Move what it computes to the call"),
    ],
)  # fmt: skip
def test_on_several_replicas_the_lines_to_write_are_told(kind: Any, call: str, words: str) -> None:
    model = compiled(kind, strategy_of(2).scope())
    before = set(vars(model))
    with pytest.raises(tmg.errors.LossError, match=re.compile(words, re.DOTALL)):
        getattr(tmg, call)(model, *([X] if call == "predict" else [X, Y]), verbose=0)
    assert set(vars(model)) == before


def test_only_what_is_called_is_refused() -> None:
    class OwnTest(Base):
        def test_step(self, data: Any) -> Any:
            return {}

    model, truth = compiled(OwnTest, strategy_of(2).scope()), compiled(Base)
    history, expected = tmg.fit(model, X, Y, **FIT), truth.fit(X, Y, **FIT)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    with pytest.raises(tmg.errors.LossError, match=r"OwnTest\.test_step"):
        tmg.fit(model, X, Y, validation_data=(X, Y), **FIT)
    assert int(model.optimizer.iterations.numpy()) == 10  # Refused before it trains.

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(X, Y, verbose=0)

    with pytest.raises(tmg.errors.LossError, match=r"OwnTest\.test_step"):
        tmg.fit(model, X, Y, callbacks=[Evaluates()], **FIT)
    assert "evaluate" not in vars(model)
