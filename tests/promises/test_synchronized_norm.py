"""``BatchNormalization(synchronized=True)`` behind a mask sees the elements of the global batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from law.model import FLOAT, Training
from law.pair import Pair

layers = keras.layers
SIZES = (7, 2, 1, 5)


def build() -> Training:
    ids = keras.Input((3,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True, **FLOAT)(ids)
    x = layers.BatchNormalization(synchronized=True, momentum=0.5, epsilon=0.1, **FLOAT)(x)
    model = keras.Model(ids, layers.Dense(2, **FLOAT)(x))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", **FLOAT)
    # Small steps: a copy of a small batch weighs 1/3 as float32, which large ones show at 1e-9.
    return Training(model, keras.optimizers.SGD(0.02), loss)


def masked() -> list[Any]:
    """Batches with more hidden tokens on one replica than on another, and one with few left."""
    random, batches = np.random.default_rng(37), []
    for size in SIZES:
        ids = random.integers(1, 7, (size, 3)).astype("int32")
        ids[: size // 2, 1:] = 0
        batches.append((ids, random.normal(size=(size, 3, 2))))
    return batches


# Fails if a mean or variance, of training or as kept for predictions, is a mean over replicas, is
# of one replica's rows, counts hidden elements, or counts copies of a small batch as more rows.
@pytest.mark.parametrize("replicas", [2, 3])
def test_masked_batches_are_normalized_as_on_one_device(replicas: int) -> None:
    batches = masked()
    Pair(build, batches[0], replicas).hold(batches)
