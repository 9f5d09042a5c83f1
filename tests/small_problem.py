"""A small classification problem: data, batch sizes, model, optimizer and loss."""

from __future__ import annotations

import keras
import numpy as np

_SIZES = (1, 2, 3, 5, 7, 9, 63, 64, 65)
MIXED = [_SIZES[(4 * i) % len(_SIZES)] for i in range(20)]  # 1, 7, 64, 2, 9, 65, ...

_random = np.random.default_rng(3)
X = _random.normal(size=(260, 6)).astype("float32")
Y = _random.integers(0, 4, 260).astype("int64")
W = _random.uniform(0.2, 2.0, 260).astype("float32")


def mlp(l2: float = 0.0) -> keras.Model:
    regularizer = keras.regularizers.L2(l2) if l2 else None
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(4)])


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def crossentropy(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
