"""prepare: model.fit, evaluate and predict of one object run those of the library."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import keras
import numpy as np
import pytest
from fit_pairs import FIT, SIZE, X, pair

import tfmultigpu as tmg

NAMES = {"fit", "evaluate", "predict"}


def is_as_before(model: Any) -> bool:
    return not NAMES & set(vars(model))


def test_options_are_those_of_the_last_prepare() -> None:
    model, _ = pair(2)
    with tmg.prepare(model, clip_norm=0.0001):
        with tmg.prepare(model, verify=False):
            model.fit(X, SIZE, **FIT)
        free = model.get_weights()
        model.fit(X, SIZE, **FIT)
    moved = max(np.abs(a - b).max() for a, b in zip(free, model.get_weights(), strict=True))
    assert 0 < moved < 1e-3  # Clipped, which Keras' own fit cannot be told to.


def test_after_errors_and_without_with_all_is_as_before() -> None:
    model, _ = pair(1)
    with pytest.raises(tmg.errors.DataError), tmg.prepare(model):
        model.fit(X[:0], SIZE[:0])
    assert is_as_before(model)
    tmg.prepare(model)  # It lasts, although nobody holds what undoes it.
    assert not is_as_before(model)
    undo = tmg.prepare(model)
    undo.close()
    assert not is_as_before(model)  # As before that one.
    model, _ = pair(1)
    undo = tmg.prepare(model)
    assert set(vars(model)) >= NAMES
    undo.close()
    undo.close()
    assert is_as_before(model)
    mine = vars(model)["fit"] = lambda: "mine"
    with pytest.raises(tmg.errors.LossError, match=r"The model replaces fit of Keras"):
        tmg.prepare(model)
    assert vars(model).pop("fit") is mine


def test_nothing_else_is_changed(tmp_path: Any) -> None:
    model, _ = pair(1)
    methods, config = [getattr(keras.Model, name) for name in NAMES], model.get_config()
    tmg.prepare(model)
    assert is_as_before(pair(1)[0])
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
    assert all(is_as_before(other) for other in others)
    np.testing.assert_array_equal(others[0].get_weights()[0], model.get_weights()[0])
    assert model.get_config() == config
    model.compile("adam", "mse")
    assert not is_as_before(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_refusals() -> None:
    class Own(keras.Sequential):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            return super().fit(*args, **kwargs)

    model, _ = pair(1)
    with pytest.raises(TypeError, match=r"takes a keras\.Model\. Received: Dense"):
        tmg.prepare(keras.layers.Dense(1))
    with pytest.raises(TypeError, match="clip"):
        tmg.prepare(model, clip=3)
    with pytest.raises(tmg.errors.LossError, match=r"Received: Own\.fit\. Call tmg\.fit inside"):
        tmg.prepare(Own([keras.Input((5,)), keras.layers.Dense(1)]))
    with tmg.prepare(model):
        with pytest.raises(TypeError, match=r"Received: \['micro_batches'\]\. Give .*tmg\.prep"):
            model.fit(X, SIZE, micro_batches=2)
        with pytest.raises(TypeError, match=r"Received: \['_use_cached_eval_dataset'\]"):
            model.evaluate(X, SIZE, _use_cached_eval_dataset=True)
    assert is_as_before(model)
