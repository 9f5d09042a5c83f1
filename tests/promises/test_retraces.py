"""A step that is traced again and again says what changes, and the line that it says helps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from law.pair import SEED, assert_replicas_agree, strategy_of

import tfmultigpu as tmg

_random = np.random.default_rng(SEED)
X = _random.normal(size=(9, 4)).astype("float32")
Y = _random.normal(size=(9, 3)).astype("float32")
BETAS = [0.95 - 0.01 * number for number in range(6)]


def model_of(layers: int = 1) -> keras.Model:
    dense = [keras.layers.Dense(3, kernel_initializer="ones") for _ in range(layers)]
    return keras.Sequential([keras.Input((4,)), *dense])


def warned(call: Callable[[int], Any], times: int = 6) -> list[str]:
    """Returns what is warned of in calls with the numbers from 0 on."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(times):
            call(number)
    return [str(one.message) for one in found]


def on_one_device() -> list[np.ndarray[Any, Any]]:
    model, optimizer = model_of(), keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", run_eagerly=True)
    for beta in BETAS:
        optimizer.beta_1 = beta
        model.train_on_batch(X, Y)
    return [np.asarray(variable.numpy()) for variable in model.variables]


# Fails if a setting that changes at each batch makes each step slow without a word, or if the line
# that the warning says does not help or gives another result.
def test_a_step_that_is_traced_at_each_call_says_what_changes() -> None:
    strategy, expected = strategy_of(2), on_one_device()
    for is_variable in (False, True):
        with strategy.scope():
            model, optimizer = model_of(), keras.optimizers.Adam(0.01)
            if is_variable:
                optimizer.beta_1 = keras.Variable(0.9, trainable=False)
        step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)

        def train(number: int, optimizer: Any = optimizer, step: Any = step) -> None:
            if isinstance(optimizer.beta_1, keras.Variable):
                optimizer.beta_1.assign(BETAS[number])
            else:
                optimizer.beta_1 = BETAS[number]
            step((X, Y))

        messages = warned(train)
        for variable, value in zip(model.variables, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-5, atol=1e-7)
        assert_replicas_agree(strategy, model.variables)
        if is_variable:
            assert not messages
        else:
            assert len(messages) == 1
            assert "optimizer.beta_1 from 0.91 to 0.9." in messages[0]
            assert "optimizer.beta_1 = keras.Variable(0.9, trainable=False)" in messages[0]


# Fails if a prediction that is traced for each batch, as each has another structure, says nothing.
def test_batches_of_another_kind_each_time_are_named() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = model_of()
    predict = tmg.make_predict_step(model, strategy, verify=False)
    (message,) = warned(lambda number: predict((X, {f"k{number}": X})))
    assert "the batch from" in message
    assert "'k4'" in message


# Fails if steps whose traces are used again are warned of: uneven batches, a rate that a callback
# sets at each batch, two sets of layers in turn.
def test_traces_that_are_used_again_are_no_matter() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model, optimizer = model_of(2), keras.optimizers.SGD(0.01, momentum=0.9)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    sizes = itertools.cycle([9, 1, 4])

    def train(number: int) -> None:
        optimizer.learning_rate = 0.01 / (1 + number)
        model.layers[0].trainable = number % 2 == 0
        if number % 4 == 0:
            optimizer.momentum = 0.9 - 0.01 * number  # For a new epoch.
        size = next(sizes)
        step((X[:size], Y[:size]))

    assert not warned(train, 12)
