"""The real tf_keras, where it is installed; the promises have a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from problems import network

import tfmultigpu as tmg
from tfmultigpu.strategies.process_state import process_state

old: Any = pytest.importorskip("tf_keras", reason="needs tf_keras: nox -s full installs it")
X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


class Heir(old.Model):  # type: ignore[misc]
    """A model of a user's own module."""


class Mixed(keras.Model):
    """A model of Keras 3 that holds a layer of tf_keras, as a layer of TensorFlow Hub is one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = old.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.hidden(x)


def legacy() -> Any:
    model = old.Sequential([old.layers.Dense(1, input_shape=(4,))])
    model.compile("sgd", "mse")
    return model


def new(**options: Any) -> Any:
    model = network(4, keras.layers.Dense(1))
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | options)
    return model


def step(model: Any, optimizer: Any = None, loss: Any = "mse", **options: Any) -> Any:
    return tmg.make_train_step(model, optimizer or keras.optimizers.SGD(), loss, **options)


ENTRIES: dict[str, Callable[[], Any]] = {
    "fit": lambda: tmg.fit(legacy(), X, Y),
    "evaluate": lambda: tmg.evaluate(legacy(), X, Y),
    "predict": lambda: tmg.predict(legacy(), X),
    "prepare": lambda: tmg.prepare(legacy()),
    "subclass": lambda: tmg.predict(Heir(), X),
    "layer inside": lambda: tmg.predict(Mixed(), X),
    "callback": lambda: tmg.fit(new(), X, Y, callbacks=[old.callbacks.EarlyStopping()]),
    "compiled loss": lambda: tmg.fit(new(loss=old.losses.MeanSquaredError()), X, Y),
    "compiled metric": lambda: tmg.evaluate(new(metrics=[old.metrics.MeanSquaredError()]), X, Y),
    "model": lambda: step(legacy()),
    "optimizer": lambda: step(new(), legacy().optimizer),
    "loss": lambda: step(new(), loss=old.losses.MeanSquaredError()),
    "class of a loss": lambda: step(new(), loss=old.losses.MeanSquaredError),
    "function of a loss": lambda: step(new(), loss=old.losses.mean_squared_error),
    "metric": lambda: step(new(), metrics=[old.metrics.MeanSquaredError()]),
    "loss_sum": lambda: tmg.loss_sum(old.losses.MeanSquaredError(), Y, Y),
    "update": lambda: tmg.apply_reduced_gradients(
        legacy().optimizer, [tf.ones([1])], [tf.Variable([1.0])]
    ),
    "checkpoints": lambda: tmg.Checkpoints("nowhere", model=new(), optimizer=legacy().optimizer),
    "explain": lambda: tmg.explain(legacy()),
    "norm": lambda: tmg.synchronize_batch_norm(legacy()),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_real_tf_keras_is_named(entry: str) -> None:
    process_state.forget()
    with pytest.raises(tmg.errors.TfMultiGpuError) as caught:
        ENTRIES[entry]()
    assert "tf_keras is Keras 2" in str(caught.value)
    assert "Write import keras" in str(caught.value)
