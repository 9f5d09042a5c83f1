"""Loss and batches."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from guarantee import Case
from recipes import (
    Problem,
    Y,
    by_fit,
    by_loop,
    by_step,
    divided_by,
    one_device,
    per_example,
    rows,
    weights,
)

Loss = functools.partial(Case, section="Loss and batches")
SHORT_LAST = Problem(rows(100))  # 64 and 36 rows
UNEVEN_LAST = Problem(rows(67))  # 64 rows and 3


def step_is_one_device(problem: Problem, **options: Any) -> Any:
    return lambda: weights(by_step(problem), one_device(problem, **options))


def fit_is_one_device(problem: Problem, **options: Any) -> Any:
    return lambda: weights(by_fit(problem, **options), one_device(problem))


def loop_is_one_device(problem: Problem, replica_loss: Any, **options: Any) -> Any:
    return lambda: weights(by_loop(problem, replica_loss, **options), one_device(problem))


# Custom loops -------------------------------------------------------------------------------------


def not_scaled(model: Any, y: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(per_example(y, y_pred))


def l2_model() -> keras.Model:
    l2 = keras.regularizers.L2(0.05)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, kernel_regularizer=l2)])


def with_l2(model: Any, y: Any, y_pred: Any) -> Any:
    return divided_by(64)(model, y, y_pred) + tf.add_n(model.losses)


LOOPS = [
    Loss(
        name="loop-constant-batch-size",
        title="Custom loop: the last batch is smaller, the loss is divided by the usual batch size",
        plain=loop_is_one_device(SHORT_LAST, divided_by(64)),
        ours=step_is_one_device(SHORT_LAST),
        links=("tf#28956", "tf#45923"),
    ),
    Loss(
        name="loop-not-scaled-sgd",
        title="Custom loop that forgets to divide the loss by the replicas, SGD",
        plain=loop_is_one_device(Problem(rows(128)), not_scaled),
        ours=step_is_one_device(Problem(rows(128))),
    ),
    Loss(
        name="loop-l2",
        title="Custom loop that adds `model.losses` (L2) on every replica",
        plain=loop_is_one_device(Problem(rows(128), build=l2_model), with_l2),
        ours=step_is_one_device(Problem(rows(128), build=l2_model)),
        links=("tf#48875",),
    ),
]


# fit ----------------------------------------------------------------------------------------------


def scalar_loss(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(y_true, tf.float32)[:, None] - y_pred))


def scalar_truth(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    return scalar_loss(y_true, y_pred)


SCALAR = Problem(rows(128), loss=scalar_loss, true_loss=scalar_truth)


TOKENS = np.random.default_rng(5).integers(1, 9, (128, 6)).astype("int32")
LENGTHS = np.where(np.arange(128) % 64 < 32, 2, 6)
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], TOKENS, 0)
TAGS = np.random.default_rng(6).integers(0, 4, (128, 6))


def tagger() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(9, 5, mask_zero=True),
            keras.layers.Dense(4),
        ]
    )


MASKED = Problem((TOKENS, TAGS), build=tagger)


FITS = [
    Loss(
        name="fit-uneven-last",
        title="`fit`: a last batch of 3 rows",
        plain=fit_is_one_device(UNEVEN_LAST),
        ours=step_is_one_device(UNEVEN_LAST),
        links=("tf#36153",),
    ),
    Loss(
        name="fit-uneven-first",
        title="`fit`: the first batch does not divide by the replicas",
        plain=fit_is_one_device(Problem(rows(70), batch_size=35)),
        ours=step_is_one_device(Problem(rows(70), batch_size=35)),
        links=("k#19246",),
        plain_says="AddN",
    ),
    Loss(
        name="fit-scalar-loss",
        title="`fit` with a loss function that returns one number for the batch",
        plain=fit_is_one_device(SCALAR),
        ours=step_is_one_device(SCALAR),
        links=("k#16285",),
        ours_kind="error",
        ours_says="LossError",
        reason="how to divide one number among replicas cannot be known; the error says what to "
        "return instead",
    ),
    Loss(
        name="fit-mask-zero",
        title="`fit`: `mask_zero`, sequences of other lengths on each replica",
        plain=fit_is_one_device(MASKED),
        ours=step_is_one_device(MASKED),
        links=("k#15323",),
    ),
]


# Shards without rows ------------------------------------------------------------------------------


IMAGES = np.random.default_rng(8).normal(size=(1, 8, 8, 3)).astype("float32")


def pooled() -> keras.Model:
    layers = [keras.layers.Conv2D(4, 3), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Dense(4)])


ONE_IMAGE = Problem((IMAGES, Y[:1]), build=pooled)


def normalized(synchronized: bool) -> Any:
    return lambda: keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.Dense(4),
        ]
    )


# Whole on every replica: the statistics are those of the batch, synchronized or not.
THREE_ON_FOUR = Problem(rows(3), build=normalized(False), replicas=4)


NO_ROWS = [
    Loss(
        name="no-rows-maxpooling2d",
        title="MaxPooling2D, a batch of one row: TensorFlow gives the second replica none",
        plain=loop_is_one_device(ONE_IMAGE, divided_by(1)),
        ours=step_is_one_device(ONE_IMAGE),
        links=("tf#21338",),
        plain_says="Check failed",
    ),
    Loss(
        name="no-rows-batchnorm",
        title="BatchNormalization, 3 rows on 4 replicas: TensorFlow gives the fourth none",
        plain=loop_is_one_device(THREE_ON_FOUR, divided_by(3)),
        ours=step_is_one_device(THREE_ON_FOUR),
        links=("tf#52986", "k#11858"),
    ),
]

CASES = [*LOOPS, *FITS, *NO_ROWS]
