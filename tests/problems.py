"""Small problems to train in float32: rows, networks, optimizers, losses.

``one_device`` trains them on one device and on replicas. The models of the promises, in float64,
are in ``law.model``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

_SIZES = (1, 2, 3, 5, 7, 9, 63, 64, 65)
MIXED = [_SIZES[(4 * i) % len(_SIZES)] for i in range(20)]  # 1, 7, 64, 2, 9, 65, ...


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape)


def normal_rows(count: int, *widths: int, seed: int = 0) -> tuple[Any, ...]:
    """Returns so many rows of normal numbers in arrays of these widths: features, and labels."""
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(count, width)).astype("float32") for width in widths)


def labelled(count: int, width: int, kinds: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Returns rows of normal numbers, the class of each, and a weight of each."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, width)).astype("float32")
    return x, random.integers(0, kinds, count), random.uniform(0.2, 2.0, count).astype("float32")


X, Y, W = labelled(260, 6, 4, seed=3)  # For ``mlp``.


def network(inputs: int, *layers: Any, **of_input: Any) -> keras.Model:
    """Returns layers one after the other; ``of_input`` is for ``keras.Input``."""
    return keras.Sequential([keras.Input((inputs,), **of_input), *layers])


def networks(inputs: int, *layers: Callable[[], Any], **of_input: Any) -> Callable[[], keras.Model]:
    """Returns what makes such a network each time, in the scope that is entered then."""
    return lambda: network(inputs, *(layer() for layer in layers), **of_input)


def mlp(l2: float = 0.0) -> keras.Model:
    regularizer = keras.regularizers.L2(l2) if l2 else None
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer)
    return network(6, hidden, keras.layers.Dense(4))


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def crossentropy(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
