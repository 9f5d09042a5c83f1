"""What fit refuses to train or to validate with."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from one_device import strategy_of

import tfmultigpu as tmg

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

X = np.random.default_rng(5).normal(size=(9, 3)).astype("float32")


@pytest.fixture(scope="module")
def strategy():
    return strategy_of(2)


def make_model(strategy, name):
    with strategy.scope():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name=name)


def forward(model, batch, training):
    return tmg.loss_sum("mse", batch[:, :1], model(batch, training=training))


def make_step(strategy, model, rate=0.1):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(rate)
    return tmg.make_train_step(model, optimizer, None, strategy, forward=forward, verify=False)


def test_a_forward_that_is_no_function_is_refused_at_the_call(strategy):
    model = make_model(strategy, "model")
    with strategy.scope():
        model.compile("sgd")
    for name in ("forward", "eval_forward"):
        functions = {"forward": forward, "eval_forward": forward, name: "mse"}
        words = rf"{name} must be a function .* Received: {name}='mse'"
        with pytest.raises(TypeError, match=words):
            tmg.fit(model, X, validation_data=X, verbose=0, **functions)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_a_step_of_other_models_is_refused(strategy):
    models = [make_model(strategy, name) for name in ("first", "second", "other")]
    steps = [make_step(strategy, model) for model in models[:2]]
    text = "model 'other', and a step that trains 'first', 'second'. Give one of these models."
    with pytest.raises(ValueError, match=re.escape(text)):
        tmg.fit(models[2], X, step=steps, verbose=0)


def test_a_step_of_a_part_of_the_model_trains(strategy):
    parts = [make_model(strategy, name) for name in ("first", "second")]
    with strategy.scope():
        whole = keras.Model()
        whole.parts = parts
    history = tmg.fit(whole, X, step=make_step(strategy, parts[1]), verbose=0)
    assert list(history.history) == ["loss"]


def test_callbacks_that_would_not_find_the_optimizer_of_the_step(strategy):
    model = make_model(strategy, "model")
    step = make_step(strategy, model)
    for found in ("no optimizer", "the optimizer 'other'"):
        for callback in (
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.ReduceLROnPlateau(),
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.TensorBoard(),
        ):
            text = f"{type(callback).__name__}, and model 'model' with {found}. In the scope, write"
            with pytest.raises(tmg.errors.LossError, match=re.escape(text)):
                tmg.fit(model, X, step=step, callbacks=[callback], verbose=0)
        with strategy.scope():
            model.compile(keras.optimizers.Adam(name="other"), "mse")
    assert int(step.optimizer.iterations.numpy()) == 0


def test_a_schedule_sets_the_rate_of_the_step_of_a_chain(strategy):
    models = [make_model(strategy, name) for name in ("first", "second")]
    steps = [make_step(strategy, model, 0.25) for model in models]
    with strategy.scope():
        models[1].compile(steps[1].optimizer)
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    history = tmg.fit(models[1], X, step=steps, epochs=2, callbacks=[halve], verbose=0)
    assert history.history["learning_rate"] == [0.125, 0.0625]
    assert [float(step.optimizer.learning_rate.numpy()) for step in steps] == [0.25, 0.0625]
