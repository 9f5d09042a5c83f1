"""A small classification problem, trained on one device and on N replicas, in four variants."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf
from one_device import ByHand, Replicated, Result, cut

SIZES = (1, 2, 3, 5, 7, 9, 63, 64, 65)
STEPS = 20
MIXED = [SIZES[(4 * i) % len(SIZES)] for i in range(STEPS)]  # 1, 7, 64, 2, 9, 65, ...

_random = np.random.default_rng(3)
X = _random.normal(size=(260, 6)).astype("float32")
Y = _random.integers(0, 4, 260).astype("int64")
W = _random.uniform(0.2, 2.0, 260).astype("float32")


def mlp(l2: float = 0.0) -> keras.Model:
    regularizer = keras.regularizers.L2(l2) if l2 else None
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer),
            keras.layers.Dense(4),
        ]
    )


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(3e-3)


def crossentropy(reduction: str = "sum_over_batch_size") -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


# What a case adds to a plain model: arrays of a batch, L2, clip_norm and the reduction.
CASES = {
    "weights": ((X, Y, W), 0.0, None, "sum_over_batch_size"),
    "l2": ((X, Y), 0.05, None, "sum_over_batch_size"),
    "clip": ((X, Y), 0.0, 0.3, "mean"),
    "all": ((X, Y, W), 0.05, 0.3, "mean_with_sample_weight"),
}


@functools.cache
def one_device(case: str, optimizer: str = "sgd") -> ByHand:
    _, l2, clip_norm, reduction = CASES[case]
    make = {"sgd": sgd, "adam": adam}[optimizer]
    return ByHand(lambda: mlp(l2), make, crossentropy(reduction), clip_norm=clip_norm)


@functools.cache
def truth(case: str, sizes: tuple[int, ...], optimizer: str = "sgd") -> Result:
    return one_device(case, optimizer).train(cut(CASES[case][0], sizes))


def replicated(replicas: int | tf.distribute.Strategy, case: str, **options: object) -> Replicated:
    _, l2, clip_norm, reduction = CASES[case]
    optimizer = {"sgd": sgd, "adam": adam}[options.pop("optimizer", "sgd")]
    loss = crossentropy(reduction)
    return Replicated(replicas, lambda: mlp(l2), optimizer, loss, clip_norm=clip_norm, **options)
