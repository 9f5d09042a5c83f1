"""Images: a convolutional classifier, which the run on a GPU trains on its parts."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from law.model import Training

from cases.case import EACH_ALONE, Case

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


def training(**options: Any) -> Training:
    """Returns a classifier under SGD, because Adam hides wrong scales."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Training(classifier(**options), keras.optimizers.SGD(0.05, momentum=0.9), loss)


BATCHES = batches(24, 17, 24, 3)
CASES = [
    Case("as it is", training, BATCHES),
    Case("micro-batches", training, BATCHES, {"micro_batches": 2}, replicas=(4,)),
    Case("owners", training, BATCHES, {"shard_update": True}),
    Case("sharded variables", training, BATCHES, {"micro_batches": 2}, sharded=EACH_ALONE),
    Case("by XLA", training, BATCHES, {"jit_compile": True}),
    Case("dropout", functools.partial(training, dropout=0.4), BATCHES),
    Case("synchronized normalisation", functools.partial(training, normalized=True), BATCHES),
]
