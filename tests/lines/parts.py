"""Models, data and steps that the examples share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from law.pair import strategy_of
from problems import network

import tfmultigpu as tmg

__all__ = ["X", "Y", "batches", "compiled", "dense", "distribute", "fit", "fitted", "made",
           "optimizer_of", "single_examples", "step", "strategy_of", "window"]  # fmt: skip

X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")


def dense(**options: Any) -> Any:
    return network(4, keras.layers.Dense(2, **options))


def made(build: Callable[[], Any] = dense, replicas: int = 2) -> Any:
    """Returns a model that is created in the scope of a strategy."""
    with strategy_of(replicas).scope():
        return build()


def optimizer_of(replicas: int = 2, kind: Any = keras.optimizers.SGD, **options: Any) -> Any:
    with strategy_of(replicas).scope():
        return kind(0.1, **options)


def compiled(loss: Any = "mse", build: Callable[[], Any] = dense, **options: Any) -> Any:
    with strategy_of(2).scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1), loss, **options)
    return model


@functools.cache
def fitted() -> Any:
    """Returns one compiled model for all examples that do not change it."""
    return compiled()


def window(variables: Any, replicas: int = 2) -> Any:
    with strategy_of(replicas).scope():
        return tmg.GradientAccumulator(variables)


def step(model: Any = None, loss: Any = "mse", optimizer: Any = None, **options: Any) -> Any:
    """Returns a step of two replicas that is not verified, which costs a second trace."""
    model = model or made()
    options = {"verify": False, **options}
    return tmg.make_train_step(model, optimizer or optimizer_of(), loss, strategy_of(2), **options)


def distribute(data: Any, replicas: int = 2, **options: Any) -> Any:
    return tmg.distribute_dataset(data, strategy_of(replicas), **options)


def batches(*arrays: Any, size: int = 4) -> tf.data.Dataset:
    return single_examples(*arrays).batch(size)


def single_examples(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y))


def fit(*data: Any, model: Any = None, **options: Any) -> Any:
    return tmg.fit(model or fitted(), *data, **{"verbose": 0, "verify": False, **options})
