"""The same model on one device, outside of every scope, and on replicas: Keras' fit and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.pair import known as known_batches
from one_device import cut, strategy_of
from problems import network

import tfmultigpu as tmg

ROWS = 37
_random = np.random.default_rng(41)
X = _random.normal(size=(ROWS, 5)).astype("float32")
KIND = _random.integers(0, 3, ROWS)
SIZE = _random.normal(size=(ROWS, 1)).astype("float32")
WEIGHT = _random.uniform(0.2, 2.0, ROWS).astype("float32")
BATCHES = cut((X, SIZE), (7, 2, 9, 1, 8, 6, 4))
FIT: dict[str, Any] = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def line() -> Any:
    return network(5, keras.layers.Dense(1))


def regression(**more: Any) -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "metrics": ["mae"], **more}


def pair(
    replicas: int, build: Callable[[], Any] = line, compiled: Callable[[], Any] = regression
) -> tuple[Any, Any]:
    """Returns a model on replicas and one on one device, with the same weights."""
    keras.utils.set_random_seed(3)
    truth = build()
    truth.compile(**compiled())
    keras.utils.set_random_seed(3)
    with strategy_of(replicas).scope():
        model = build()
        model.compile(**compiled())
    model.set_weights(truth.get_weights())
    return model, truth


def known(batches: Sequence[Any] = BATCHES) -> tf.data.Dataset:
    return known_batches(batches)


def assert_same(model: Any, truth: Any, history: Any, expected: Any) -> None:
    """Holds weights, steps and History to those of Keras' fit on one device."""
    for ours, theirs in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == int(truth.optimizer.iterations.numpy())
    assert list(history.history) == list(expected.history)
    assert history.epoch == expected.epoch
    assert history is model.history
    for name, values in expected.history.items():
        np.testing.assert_allclose(
            history.history[name], values, rtol=3e-6, atol=1e-6, err_msg=name
        )


def hold(models: tuple[Any, Any], data: Any, theirs: Any = None, **options: Any) -> list[str]:
    """Trains both; returns what ours said of data that ran out.

    ``theirs`` is the data of Keras, if it is not the same.
    """
    model, truth = models
    options = {"shuffle": False, "verbose": 0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = keras.Model.fit(truth, data() if theirs is None else theirs(), **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = tmg.fit(model, data(), **options)
    assert_same(model, truth, history, expected)
    return [str(w.message) for w in told if "ran out of data" in str(w.message)]
