"""Models that replace methods of Keras, which steps do not call: the lines to write instead."""

from __future__ import annotations

import re
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
    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "own": tf.constant(1.0)}

    def test_step(self, data: Any) -> Any:
        return {}


class OwnLoss(Base):
    def compute_loss(self, **_: Any) -> Any:
        return tf.constant(0.0)


class OwnMetrics(Base):
    def compute_metrics(self, *args: Any, **_: Any) -> Any:
        return {}


class OwnResults(Base):
    def get_metrics_result(self) -> Any:
        return {**super().get_metrics_result(), "more": 1.0}


class OwnPredict(Base):
    def predict_step(self, data: Any) -> Any:
        return 2 * super().predict_step(data)


class OwnEvaluate(Base):
    def evaluate(self, *args: Any, **_: Any) -> Any:
        return {}


def compiled(kind: Any, replicas: int = 1) -> Any:
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope():
        model = kind()
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (OwnStep, "fit", r"OwnStep\.train_step\. .*def forward\(model, batch, training\):.*"
         r"tmg\.LossSum\(.*forward=forward\).*chain_steps.*On one device write model\.fit"),
        (OwnLoss, "fit", r"OwnLoss\.compute_loss.*return tmg\.LossSum\("),
        (OwnMetrics, "fit", r"OwnMetrics\.compute_metrics.*model\.compile\(metrics="),
        (OwnResults, "fit", r"OwnResults\.get_metrics_result.*model\.compile\(metrics="),
        (OwnStep, "evaluate", r"OwnStep\.test_step.*make_eval_step\(model, None"),
        (OwnPredict, "predict", r"OwnPredict\.predict_step.*Move what it computes to the call"),
    ],
)  # fmt: skip
def test_the_lines_to_write_are_told(kind: Any, call: str, words: str, replicas: int) -> None:
    model = compiled(kind, replicas)
    before = set(vars(model))
    with pytest.raises(tmg.errors.LossError, match=re.compile(words, re.DOTALL)):
        getattr(tmg, call)(model, *([X] if call == "predict" else [X, Y]), verbose=0)
    assert set(vars(model)) == before


@pytest.mark.parametrize("purpose", ["train", "test", "predict"])
def test_a_loop_of_its_own_is_not_passed_over(purpose: str) -> None:
    name = f"make_{purpose}_function"
    model = compiled(type("Own", (Base,), {name: lambda self, force=False: None}))
    calls: dict[str, Any] = {
        "train": lambda: tmg.fit(model, X, Y, **FIT),
        "test": lambda: tmg.evaluate(model, X, Y),
        "predict": lambda: tmg.predict(model, X),
    }
    with pytest.raises(tmg.errors.LossError, match=rf"Own\.{name}\. "):
        calls[purpose]()


def test_a_method_of_the_object_alone_is_not_passed_over() -> None:
    model = compiled(Base)
    vars(model)["train_step"] = lambda data: {}
    with pytest.raises(tmg.errors.LossError, match=r"Base\.train_step\. "):
        tmg.fit(model, X, Y, **FIT)


def test_only_what_is_called_is_refused() -> None:
    class OwnTest(Base):
        def test_step(self, data: Any) -> Any:
            return {}

    class Calls(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(X, Y, verbose=0)

    model, truth = compiled(OwnTest, 2), compiled(Base)
    history, expected = tmg.fit(model, X, Y, **FIT), truth.fit(X, Y, **FIT)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    with pytest.raises(tmg.errors.LossError, match=r"OwnTest\.test_step"):
        tmg.fit(model, X, Y, validation_data=(X, Y), **FIT)
    assert int(model.optimizer.iterations.numpy()) == 10  # Refused before it trains.
    for kind, words in ((OwnTest, r"OwnTest\.test_step"), (OwnEvaluate, r"OwnEvaluate\.evaluate")):
        model = compiled(kind, 2)
        with pytest.raises(tmg.errors.LossError, match=words):
            tmg.fit(model, X, Y, callbacks=[Calls()], **FIT)
        assert "evaluate" not in vars(model)
