"""Models, data and arguments that the loops refuse: what was received, and the line to write."""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
from fit_pairs import BATCHES, FIT, SIZE, X, known, line, pair
from one_device import as_dataset, strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.errors import DataError, LossError

ARRAYS = X, SIZE


@pytest.fixture(scope="module")
def model() -> Any:
    return pair(2)[0]


# Arguments and data -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        (TypeError, "Write batch_size or callbacks or", ARRAYS, {"arguments": 1}),
        (TypeError, r"Received: none\. Write tmg\.fit\(model, data\)", None, {}),
        (DataError, "for one output", ({"x": X}, (SIZE, SIZE)), {"class_weight": {0: 2.0}}),
        (TypeError, "must be a whole number.*or 'auto'.*=None", ARRAYS, {"steps_per_call": None}),
        (ValueError, "must be a whole number.*or 'auto'", ARRAYS, {"steps_per_call": 0}),
        (ValueError, "steps_per_epoch must be a whole number", ARRAYS, {"steps_per_epoch": -1}),
    ],
    ids=lambda case: case[1],
)  # fmt: skip
def test_an_argument_of_fit_that_does_not_fit(model: Any, case: Any) -> None:
    error, words, data, options = case
    with pytest.raises(error, match=words):
        tmg.fit(model, data, **{"verbose": 0, **options})


def test_data_that_does_not_fit(model: Any, subtests: pytest.Subtests) -> None:
    endless = {"validation_data": as_dataset(BATCHES).repeat()}
    sharded = tmg.distribute_dataset(as_dataset(BATCHES), strategy_of(2))
    every: list[tuple[Any, Any, str, dict[str, Any]]] = [
        (tmg.fit, ARRAYS, r"has no end.*validation_steps=None.*=100", endless),
        (tmg.fit, sharded, r"batch_size=3", {"batch_size": 3}),
        (tmg.predict, X[:0], "The data has no batches", {}),
    ]
    for call, data, words, options in every:
        with subtests.test(words), pytest.raises(DataError, match=words):
            call(model, data, verbose=0, **options)
    for steps in (0, -1, 2.5):
        with (
            subtests.test(steps=steps),
            pytest.raises((TypeError, ValueError), match=r"at least 1, or None\. .*: steps="),
        ):
            tmg.evaluate(model, known(), steps=steps)
    with pytest.raises(TypeError, match=r"Received: none\. Write tmg\.predict\("):
        tmg.predict(model)


# Models -------------------------------------------------------------------------------------------


def test_models_that_cannot_be_trained(model: Any, subtests: pytest.Subtests) -> None:
    for call in (tmg.fit, tmg.evaluate, tmg.predict):
        with (
            subtests.test(call=call),
            pytest.raises(TypeError, match=r"needs a keras\.Model.*Dense.*keras\.Sequential\("),
        ):
            call(keras.layers.Dense(1), ARRAYS)
    for call, words in ((tmg.fit, ""), (tmg.evaluate, r"\('adam', loss=.*or with a step tmg\.fit")):
        with pytest.raises(LossError, match=rf"is not compiled.*model\.compile.*{words}"):
            call(line(), ARRAYS)


def test_what_was_created_outside_the_scope() -> None:
    with strategy_of(2).scope():
        model = line()
    model.compile("sgd", "mse", metrics=["mae"])
    with pytest.raises(tmg.ScopeError, match="The optimizer was created outside the scope"):
        tmg.fit(model, ARRAYS)
    assert set(tmg.evaluate(model, ARRAYS, return_dict=True)) == {
        "loss",
        "mae",
    }  # Made in the scope by us.
    model.compile(loss="mse", metrics=[keras.metrics.MeanAbsoluteError()])
    with pytest.raises(tmg.ScopeError, match="The metric was created outside the scope"):
        tmg.evaluate(model, ARRAYS)
    dense = keras.layers.Dense(1)
    dense.build((None, 5))
    with strategy_of(2).scope():
        mixed = network(5, dense, keras.layers.Dense(1))
    with pytest.raises(tmg.ScopeError, match=r"The layer .* was created outside the scope"):
        tmg.predict(mixed, X)


# Models that replace methods of Keras, which steps do not call ------------------------------------


def replacing(*methods: str) -> Any:
    """A model on two replicas of a class with methods of its own, which return nothing."""
    kind = type(
        "Own", (keras.Sequential,), {name: lambda self, *args, **options: {} for name in methods}
    )
    return pair(2, lambda: kind([keras.Input((5,)), keras.layers.Dense(1)]))[0]


@pytest.mark.parametrize(
    ("method", "call", "words"),
    [
        ("train_step", "fit", r"Own\.train_step\. .*def forward\(model, batch, training\):.*"
         r"tmg\.LossSum\(.*forward=forward\).*chain_steps.*On one device write model\.fit"),
        ("compute_loss", "fit", r"Own\.compute_loss.*return tmg\.LossSum\("),
        ("compute_metrics", "fit", r"Own\.compute_metrics.*model\.compile\(metrics="),
        ("get_metrics_result", "fit", r"Own\.get_metrics_result.*model\.compile\(metrics="),
        ("test_step", "evaluate", r"Own\.test_step.*make_eval_step\(model, None"),
        ("predict_step", "predict", r"Own\.predict_step.*tmg\.predict\(predictor, data\)"),
        ("make_train_function", "fit", r"Own\.make_train_function\. "),
        ("make_test_function", "evaluate", r"Own\.make_test_function\. "),
        ("make_predict_function", "predict", r"Own\.make_predict_function\. "),
    ],
)  # fmt: skip
def test_the_lines_to_write_are_told(method: str, call: str, words: str) -> None:
    model = replacing(method)
    before = set(vars(model))
    with pytest.raises(LossError, match=re.compile(words, re.DOTALL)):
        getattr(tmg, call)(model, *([X] if call == "predict" else ARRAYS), verbose=0)
    assert set(vars(model)) == before


def test_only_what_is_called_is_refused() -> None:
    class Calls(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(X, SIZE, verbose=0)

    model = replacing("test_step")
    tmg.fit(model, X, SIZE, **FIT)
    trained = int(model.optimizer.iterations.numpy())
    with pytest.raises(LossError, match=r"Own\.test_step"):
        tmg.fit(model, X, SIZE, validation_data=ARRAYS, **FIT)
    assert int(model.optimizer.iterations.numpy()) == trained > 0  # Refused before it trains.
    for method in ("test_step", "evaluate"):
        model = replacing(method)
        with pytest.raises(LossError, match=rf"Own\.{method}"):
            tmg.fit(model, X, SIZE, callbacks=[Calls()], **FIT)
        assert "evaluate" not in vars(model)
    model = pair(2)[0]
    vars(model)["train_step"] = lambda data: {}  # Of this object alone.
    with pytest.raises(LossError, match=r"Sequential\.train_step\. "):
        tmg.fit(model, X, SIZE, **FIT)
