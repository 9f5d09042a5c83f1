"""Models that replace methods of Keras, which steps do not call: the lines to write instead."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
from each import each
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


def replacing(*methods: str) -> type[Base]:
    """A class that has methods of its own, which return nothing."""
    return type("Own", (Base,), {name: lambda self, *args, **options: {} for name in methods})


def compiled(kind: Any, replicas: int = 1) -> Any:
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope():
        model = kind()
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


@each(
    ("method", "call", "words"),
    [
        ("train_step", "fit", r"Own\.train_step\. .*def forward\(model, batch, training\):.*"
         r"tmg\.LossSum\(.*forward=forward\).*chain_steps.*On one device write model\.fit"),
        ("compute_loss", "fit", r"Own\.compute_loss.*return tmg\.LossSum\("),
        ("compute_metrics", "fit", r"Own\.compute_metrics.*model\.compile\(metrics="),
        ("get_metrics_result", "fit", r"Own\.get_metrics_result.*model\.compile\(metrics="),
        ("test_step", "evaluate", r"Own\.test_step.*make_eval_step\(model, None"),
        ("predict_step", "predict", r"Own\.predict_step.*Move what it computes to the call"),
        ("make_train_function", "fit", r"Own\.make_train_function\. "),
        ("make_test_function", "evaluate", r"Own\.make_test_function\. "),
        ("make_predict_function", "predict", r"Own\.make_predict_function\. "),
    ],
)  # fmt: skip
def test_the_lines_to_write_are_told(method: str, call: str, words: str) -> None:
    model = compiled(replacing(method), 2)
    before = set(vars(model))
    with pytest.raises(tmg.errors.LossError, match=re.compile(words, re.DOTALL)):
        getattr(tmg, call)(model, *([X] if call == "predict" else [X, Y]), verbose=0)
    assert set(vars(model)) == before


def test_a_method_of_the_object_alone_is_not_passed_over() -> None:
    model = compiled(Base)
    vars(model)["train_step"] = lambda data: {}
    with pytest.raises(tmg.errors.LossError, match=r"Base\.train_step\. "):
        tmg.fit(model, X, Y, **FIT)


def test_only_what_is_called_is_refused() -> None:
    class Calls(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(X, Y, verbose=0)

    model, truth = compiled(replacing("test_step"), 2), compiled(Base)
    history, expected = tmg.fit(model, X, Y, **FIT), truth.fit(X, Y, **FIT)
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    with pytest.raises(tmg.errors.LossError, match=r"Own\.test_step"):
        tmg.fit(model, X, Y, validation_data=(X, Y), **FIT)
    assert int(model.optimizer.iterations.numpy()) == 10  # Refused before it trains.
    for method in ("test_step", "evaluate"):
        model = compiled(replacing(method), 2)
        with pytest.raises(tmg.errors.LossError, match=rf"Own\.{method}"):
            tmg.fit(model, X, Y, callbacks=[Calls()], **FIT)
        assert "evaluate" not in vars(model)
