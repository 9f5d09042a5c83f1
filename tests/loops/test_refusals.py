"""Arguments of fit that do not fit: each error says what was received and the line to write."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_pairs import BATCHES, SIZE, WEIGHT, X, line, pair
from one_device import as_dataset, strategy_of

import tfmultigpu as tmg
from tfmultigpu.errors import DataError, LossError

ARRAYS = X, SIZE


@pytest.fixture(scope="module")
def model() -> Any:
    return pair(2)[0]


CASES: list[tuple[Any, str, Any, dict[str, Any]]] = [
    (DataError, "has no batches", ARRAYS, {"validation_data": (X[:0], SIZE[:0])}),
    (TypeError, "unexpected keyword argument 'epoch'", ARRAYS, {"epoch": 1}),
    (TypeError, r"Received: none\. Write tmg\.fit\(model, data\)", None, {}),
    (DataError, r"a tuple of 2 beside y\. Write tmg\.fit\(model, \(x, y\)", ARRAYS, {"y": SIZE}),
    (DataError, "shuffle must be True or False", ARRAYS, {"shuffle": "batch"}),
    (DataError, "leaves examples.*of 37 examples", ARRAYS, {"validation_split": 0.999}),
    (DataError, "leaves examples.*validation_split=2", ARRAYS, {"validation_split": 2}),
    (DataError, "class_weight must be a dict", ARRAYS, {"class_weight": {"a": 1.0}}),
    (DataError, "Class weights and sample weights", (*ARRAYS, WEIGHT), {"class_weight": {0: 2.0}}),
    (DataError, "for one output", ({"x": X}, (SIZE, SIZE)), {"class_weight": {0: 2.0}}),
    (TypeError, "must be a whole number.*or 'auto'.*=None", ARRAYS, {"steps_per_call": None}),
    (ValueError, "must be a whole number.*or 'auto'", ARRAYS, {"steps_per_call": 0}),
    (ValueError, "steps_per_epoch must be a whole number", ARRAYS, {"steps_per_epoch": -1}),
    (ValueError, "verbose must be 0, 1, 2 or 'auto'", ARRAYS, {"verbose": 3}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1][:20])
def test_an_argument_that_does_not_fit(model: Any, case: Any) -> None:
    error, words, data, options = case
    with pytest.raises(error, match=words):
        tmg.fit(model, data, **{"verbose": 0, **options})


def test_data_that_does_not_fit(model: Any) -> None:
    endless = as_dataset(BATCHES).repeat()
    sharded = tmg.distribute_dataset(as_dataset(BATCHES), strategy_of(2))
    every: list[tuple[Any, str, dict[str, Any]]] = [
        (endless, r"has no end, so a pass.*steps_per_epoch=100, or leave", {}),
        (ARRAYS, r"has no end.*validation_steps=None.*=100", {"validation_data": endless}),
        (endless, "validation_split works only for arrays", {"validation_split": 0.5}),
        (sharded, "so shares cannot be applied", {"shares": (1, 2)}),
        (sharded, r"batch_size=3", {"batch_size": 3}),
    ]
    for data, words, options in every:
        with pytest.raises(DataError, match=words):
            tmg.fit(model, data, verbose=0, **options)


def test_checkpoints_resume_whole_passes_only(model: Any, tmp_path: Any) -> None:
    callback = tmg.Checkpoints(tmp_path, model, model.optimizer).callback()
    for data in (ARRAYS, as_dataset(BATCHES)):
        with pytest.raises(DataError, match=r"only if an epoch is one pass.*take\(steps\)"):
            tmg.fit(model, data, steps_per_epoch=3, callbacks=[callback], verbose=0)


def test_averages_of_sharded_variables_are_told() -> None:
    with strategy_of(2).scope(), tmg.sharded_variables(at_least=0):
        model = line()
        model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    with pytest.raises(LossError, match=r"averages into sharded variables.*SGD with use_ema"):
        tmg.fit(model, ARRAYS, verbose=0)


def test_models_that_cannot_be_trained(model: Any) -> None:
    with (
        strategy_of(3).scope(),
        pytest.raises(tmg.ScopeError, match=r"scope of another strategy.*fit outside the scope"),
    ):
        tmg.fit(model, ARRAYS)
    with pytest.raises(TypeError, match=r"fit needs a keras\.Model\. Received: Dense"):
        tmg.fit(keras.layers.Dense(1), ARRAYS)
    with pytest.raises(LossError, match=r"is not compiled.*model\.compile\("):
        tmg.fit(line(), ARRAYS)
    with strategy_of(2).scope():
        outside = line()
    outside.compile("sgd", "mse")
    with pytest.raises(tmg.ScopeError, match="The optimizer was created outside the scope"):
        tmg.fit(outside, ARRAYS)
    with pytest.raises(DataError, match=r"cannot run inside a tf\.function"):
        tf.function(lambda: tmg.fit(model, ARRAYS), autograph=False)()


def test_a_loss_that_keras_resolves_by_shapes_is_an_error() -> None:
    with strategy_of(2).scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "crossentropy")
    with pytest.raises(ValueError, match="crossentropy"):
        tmg.fit(model, (X, np.eye(3, dtype="float32")[np.arange(37) % 3]), verbose=0)


def test_a_compiled_loss_without_a_reduction_is_an_error() -> None:
    model, _ = pair(2, compiled=lambda: {"loss": keras.losses.MeanSquaredError(reduction=None)})
    for run in (tmg.fit, tmg.evaluate):
        with pytest.raises(tmg.errors.LossError, match="reduction='sum'"):
            run(model, ARRAYS, batch_size=8, verbose=0)
