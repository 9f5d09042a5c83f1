"""fit_here: model.fit, model.evaluate and model.predict of one object run those of the library."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import warnings
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg

ROWS = 37
_random = np.random.default_rng(5)
X = _random.normal(size=(ROWS, 5)).astype("float32")
Y = _random.normal(size=(ROWS, 1)).astype("float32")
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
NAMES = ("fit", "evaluate", "predict")


def line():
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dropout(0.3, seed=4), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def made(replicas):
    keras.utils.set_random_seed(3)
    truth = line()
    with strategy_of(replicas).scope():
        model = line()
    model.set_weights(truth.get_weights())
    return model, truth


def is_as_before(model):
    return not set(NAMES) & set(vars(model))


def test_calls_of_keras_give_what_one_device_gives():
    model, truth = made(3)
    valid = [X[:11], Y[:11]]
    with tmg.fit_here(model) as same:
        assert same is model
        history = model.fit(X, Y, validation_data=valid, **FIT)
        logs = model.evaluate(X, Y, 5, 0)
        predicted = model.predict(X, 5, verbose=0)
    expected = truth.fit(X, Y, validation_data=valid, **FIT)
    assert history is model.history
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=2e-5, err_msg=name)
    assert logs == pytest.approx(truth.evaluate(X, Y, batch_size=ROWS, verbose=0), rel=2e-5)
    np.testing.assert_allclose(predicted, truth.predict(X, verbose=0), rtol=2e-5, atol=1e-6)
    assert is_as_before(model)


def test_models_that_are_created_after_a_fit_begin_as_after_that_of_keras():
    begun = []
    for fits in (tmg.fit, keras.Model.fit):
        keras.utils.set_random_seed(3)
        model = line()
        fits(model, X, Y, shuffle=True, verbose=0)
        begun.append(line().get_weights())
    for one, other in zip(*begun, strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_runs_ours_and_says_so_once(caplog):
    model, _ = made(2)
    with caplog.at_level(logging.WARNING, "tfmultigpu"), tmg.fit_here(model, clip_norm=0.0001):
        with tmg.fit_here(model, verify=False):
            model.fit(X, Y, **FIT)  # The options of the innermost block.
        free = model.get_weights()
        model.fit(X, Y, **FIT)
    moved = max(np.abs(a - b).max() for a, b in zip(free, model.get_weights(), strict=True))
    assert 0 < moved < 1e-4  # Clipped, which Keras' own fit cannot be told to.
    lines = [one.getMessage() for one in caplog.records if "in this block" in one.getMessage()]
    assert len(lines) == 1
    assert "on MirroredStrategy with 2 replica(s)" in lines[0]


def test_after_errors_and_in_any_order_of_leaving_all_is_as_before():
    model, _ = made(1)
    with pytest.raises(tmg.errors.DataError), tmg.fit_here(model):
        model.fit(X[:0], Y[:0])
    assert is_as_before(model)
    first, second = tmg.fit_here(model), tmg.fit_here(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not is_as_before(model)
    second.__exit__(None, None, None)
    assert is_as_before(model)
    mine = vars(model)["fit"] = lambda: "mine"
    with tmg.fit_here(model):
        assert vars(model)["fit"] is not mine
    assert vars(model).pop("fit") is mine


def test_nothing_else_is_changed(tmp_path):
    model, _ = made(1)
    methods, config = [getattr(keras.Model, name) for name in NAMES], model.get_config()
    with tmg.fit_here(model):
        assert is_as_before(line())
        assert [getattr(keras.Model, name) for name in NAMES] == methods
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Of NumPy, in Keras.
            model.save(tmp_path / "model.keras")
            others = [
                keras.models.load_model(tmp_path / "model.keras"),
                keras.models.clone_model(model),
                copy.deepcopy(model),
                pickle.loads(pickle.dumps(model)),
            ]
        assert all(is_as_before(one) for one in others)
        np.testing.assert_array_equal(others[0].get_weights()[0], model.get_weights()[0])
        assert model.get_config() == config
        model.export(tmp_path / "exported", verbose=False)
        model.compile("adam", "mse")
        assert not is_as_before(model)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None


def test_a_model_with_a_train_step_of_its_own():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {**super().train_step(data), "own": 1.0}

    model = Own([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with tmg.fit_here(model):
        assert model.fit(X, Y, **FIT).history["own"] == [1.0, 1.0]


def test_refusals():
    model, _ = made(1)
    with pytest.raises(TypeError, match=r"takes a keras\.Model\. Received: Dense"):
        tmg.fit_here(keras.layers.Dense(1)).__enter__()
    with pytest.raises(TypeError, match=r"Keras does not have: .*clip_norm.*Received: epochs=3"):
        tmg.fit_here(model, epochs=3).__enter__()
    with (
        tmg.fit_here(model, forward=lambda model, batch, training: None),
        pytest.raises(tmg.errors.LossError, match=r"Received: fit_here with forward"),
    ):
        model.evaluate(X, Y)
    with tmg.fit_here(model):
        with pytest.raises(TypeError, match=r"Received: micro_batches=2\. Give .* to fit_here"):
            model.fit(X, Y, micro_batches=2)
        with pytest.raises(TypeError, match=r"Received: _use_cached_eval_dataset=True"):
            model.evaluate(X, Y, _use_cached_eval_dataset=True)
    assert is_as_before(model)


def test_a_fit_that_somebody_has_replaced_is_not_passed_over(monkeypatch):
    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    with pytest.raises(
        tmg.errors.LossError, match=r"Received: Own\.fit, defined in .*test_fit_here"
    ):
        tmg.fit_here(Own([keras.Input((5,)), keras.layers.Dense(1)])).__enter__()
    model, _ = made(1)
    with tmg.fit_here(model):
        original = keras.Model.fit
        # As libraries do that log each fit.
        monkeypatch.setattr(keras.Model, "fit", lambda *args, **kwargs: original(*args, **kwargs))
        with pytest.raises(tmg.errors.LossError, match=r"Call tmg\.fit inside it"):
            model.fit(X, Y, **FIT)


class Evaluating(keras.callbacks.Callback):
    """Evaluates and predicts as other people's callbacks do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        found = self.model.evaluate(X[:7], Y[:7], batch_size=4, verbose=0, return_dict=True)
        self.seen.append((found, self.model.predict(X[:7], batch_size=4, verbose=0)))


def test_callbacks_of_fit_evaluate_as_on_one_device() -> None:
    def run(replicas: int) -> list[Any]:
        model, _ = made(replicas)
        callback = Evaluating()
        tmg.fit(model, (X, Y), batch_size=4, epochs=2, callbacks=[callback], verbose=0)
        assert not {"evaluate", "predict"} & vars(model).keys()
        return callback.seen

    expected = run(1)
    for (found, predicted), (logs, predictions) in zip(run(3), expected, strict=True):
        assert found == pytest.approx(logs, rel=1e-5)
        np.testing.assert_allclose(predicted, predictions, atol=1e-6)


def test_a_test_step_in_a_callback_of_fit_is_refused_on_replicas() -> None:
    class Own(keras.Sequential):
        def test_step(self, data: Any) -> Any:
            return {"loss": tf.reduce_mean(data[1])}

    for replicas, error in ((1, None), (2, tmg.errors.LossError)):
        with strategy_of(replicas).scope():
            model = Own([keras.Input((X.shape[1],)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        callback = Evaluating()
        if error is None:
            tmg.fit(model, (X, Y), callbacks=[callback], verbose=0)
            assert len(callback.seen) == 1
        else:
            with pytest.raises(error, match="test_step"):
                tmg.fit(model, (X, Y), callbacks=[callback], verbose=0)
        assert "evaluate" not in vars(model)
