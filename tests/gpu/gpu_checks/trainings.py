"""What the checks train, and on what."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases.images import training

import tfmultigpu as tmg


def step_on(strategy: tf.distribute.Strategy, step: Any = None, **options: Any) -> Any:
    """Returns our step of a classifier that begins the same each time.

    Args:
        strategy: Where it trains.
        step: More arguments of ``make_train_step``.
        options: Those of ``classifier``.
    """
    keras.utils.set_random_seed(3)
    with strategy.scope():
        this = training(**options)
    return tmg.make_train_step(this.model, this.optimizer, this.loss, strategy, **(step or {}))


def on_device(device: str) -> tf.distribute.Strategy:
    """Returns the strategy of one device, such as ``"GPU:0"``."""
    return tf.distribute.OneDeviceStrategy(f"/device:{device}")


def apart(one: Any, other: Any) -> float:
    """Returns the largest difference of any variable of two models or optimizers."""
    pairs = zip(one.variables, other.variables, strict=True)
    return max(
        float(np.max(np.abs(a.numpy().astype("float64") - b.numpy().astype("float64")), initial=0))
        for a, b in pairs
    )
