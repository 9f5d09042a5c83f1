"""What the checks train, and on what."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

SIDE, CLASSES = 12, 10


def batches(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns batches of images and integer labels; the same each time."""
    random = np.random.default_rng(11)
    return [
        (
            random.normal(size=(rows, SIDE, SIDE, 3)).astype("float32"),
            random.integers(0, CLASSES, rows),
        )
        for rows in sizes
    ]


def classifier(
    *, width: int = 32, normalized: bool = False, dropout: float = 0.0, dtype: str = "float32"
) -> keras.Model:
    """Returns a small convolutional network without kinks: two sides that differ by a bit stay so.

    Args:
        width: Channels.
        normalized: Normalise over the rows of all replicas.
        dropout: Rate.
        dtype: A Keras policy, such as ``"mixed_bfloat16"``.
    """
    layers = keras.layers
    stack: list[Any] = [
        keras.Input((SIDE, SIDE, 3)),
        # No bias before a normalisation: it has no gradient but noise.
        layers.Conv2D(width, 3, use_bias=not normalized, dtype=dtype),
    ]
    if normalized:
        stack.append(layers.BatchNormalization(synchronized=True, dtype=dtype))
    stack += [
        layers.Activation("tanh", dtype=dtype),
        layers.AveragePooling2D(2, dtype=dtype),
        layers.Flatten(dtype=dtype),
        layers.Dense(2 * width, "gelu", dtype=dtype),
    ]
    if dropout:
        stack.append(layers.Dropout(dropout, seed=5, dtype=dtype))
    stack += [layers.Dense(CLASSES, dtype=dtype), layers.Activation("linear", dtype="float32")]
    return keras.Sequential(stack)


def loss() -> keras.losses.Loss:
    """Returns the loss of a classifier."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def training(**options: Any) -> tmg.testing.Training:
    """Returns what ``assert_replica_invariant`` trains; SGD, because Adam hides wrong scales."""
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return tmg.testing.Training(classifier(**options), optimizer, loss())


def step_on(strategy: tf.distribute.Strategy, step: Any = None, **options: Any) -> Any:
    """Returns our step of a classifier that begins the same each time.

    Args:
        strategy: Where it trains.
        step: More arguments of ``make_train_step``.
        options: Those of ``classifier``.
    """
    keras.utils.set_random_seed(3)
    with strategy.scope():
        one = training(**options)
    return tmg.make_train_step(one.model, one.optimizer, one.loss, strategy, **(step or {}))


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
