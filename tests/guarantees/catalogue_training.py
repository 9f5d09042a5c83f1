"""Loss and batches; optimizers, clipping, accumulation, precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from guarantee import Case, Difference
from keras import optimizers
from one_device import strategy_of
from problems import X, Y
from recipes import (
    Problem,
    Weights,
    by_fit,
    by_loop,
    by_step,
    dataset_of,
    divided_by,
    fresh,
    mirrored,
    per_example,
    plainly,
    problem,
    rows,
)

import tfmultigpu as tmg

EVEN = problem(rows(128))
SHORT_LAST = problem(rows(100))  # 64 and 36 rows
UNEVEN_LAST = problem(rows(67))  # 64 rows and 3


def trained(
    name: str,
    title: str,
    plain: Callable[[Problem], Weights],
    trains: Problem,
    ours: Problem | None = None,
    *,
    section: str,
    **more: Any,
) -> Case:
    """A problem trained by plain code and by our step; both against one device."""
    step = functools.partial(by_step, ours or trains)
    return Case(name, section, title, plainly(plain, trains), step, **more)


Loss = functools.partial(trained, section="Loss and batches")
Update = functools.partial(trained, section="Optimizers, clipping, accumulation, precision")


def loop(replica_loss: Any, **options: Any) -> Callable[[Problem], Weights]:
    return functools.partial(by_loop, replica_loss=replica_loss, **options)


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
        "loop-constant-batch-size",
        "Custom loop: the last batch is smaller, the loss is divided by the usual batch size",
        loop(divided_by(64)),
        SHORT_LAST,
        links=("tf#28956", "tf#45923"),
    ),
    Loss(
        "loop-not-scaled-sgd",
        "Custom loop that forgets to divide the loss by the replicas, SGD",
        loop(not_scaled),
        EVEN,
    ),
    Loss(
        "loop-l2",
        "Custom loop that adds `model.losses` (L2) on every replica",
        loop(with_l2),
        problem(rows(128), build=l2_model),
        links=("tf#48875",),
    ),
]


# fit ----------------------------------------------------------------------------------------------


def scalar_loss(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(y_true, tf.float32)[:, None] - y_pred))


def scalar_truth(model: Any, batch: Any) -> Any:
    x, y = batch
    return scalar_loss(y, model(x, training=True))


TOKENS = np.random.default_rng(5).integers(1, 9, (128, 6)).astype("int32")
LENGTHS = np.where(np.arange(128) % 64 < 32, 2, 6)
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], TOKENS, 0)
TAGS = np.random.default_rng(6).integers(0, 4, (128, 6))


def embedding(*after: keras.layers.Layer, masked: bool = False) -> keras.Model:
    table = keras.layers.Embedding(9, 5, mask_zero=masked)
    inputs = keras.Input((6,), dtype="int32")
    return keras.Sequential([inputs, table, *after, keras.layers.Dense(4)])


FITS = [
    Loss(
        "fit-uneven-last",
        "`fit`: a last batch of 3 rows",
        by_fit,
        UNEVEN_LAST,
        links=("tf#36153",),
    ),
    Loss(
        "fit-uneven-first",
        "`fit`: the first batch does not divide by the replicas",
        by_fit,
        problem(rows(70), batch_size=35),
        links=("k#19246",),
        plain_says="AddN",
    ),
    Loss(
        "fit-scalar-loss",
        "`fit` with a loss function that returns one number for the batch",
        by_fit,
        problem(rows(128), loss=scalar_loss, whole=scalar_truth),
        links=("k#16285",),
        ours_kind="error",
        ours_says="LossError",
        reason="how to divide one number among replicas cannot be known; the error says what to "
        "return instead",
    ),
    Loss(
        "fit-mask-zero",
        "`fit`: `mask_zero`, sequences of other lengths on each replica",
        by_fit,
        problem((TOKENS, TAGS), build=functools.partial(embedding, masked=True)),
        links=("k#15323",),
    ),
]


# Shards without rows ------------------------------------------------------------------------------


IMAGES = np.random.default_rng(8).normal(size=(1, 8, 8, 3)).astype("float32")


def pooled() -> keras.Model:
    layers = [keras.layers.Conv2D(4, 3), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Dense(4)])


def normalized(synchronized: bool) -> Any:
    return lambda: keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.Dense(4),
        ]
    )


NO_ROWS = [
    Loss(
        "no-rows-maxpooling2d",
        "MaxPooling2D, a batch of one row: TensorFlow gives the second replica none",
        loop(divided_by(1)),
        problem((IMAGES, Y[:1]), build=pooled),
        links=("tf#21338",),
        plain_says="Check failed",
    ),
    Loss(
        "no-rows-batchnorm",
        "BatchNormalization, 3 rows on 4 replicas: TensorFlow gives the fourth none",
        loop(divided_by(3)),
        # Whole on every replica: the statistics are those of the batch, synchronized or not.
        problem(rows(3), build=normalized(False), replicas=4),
        links=("tf#52986", "k#11858"),
    ),
]


# Optimizers ---------------------------------------------------------------------------------------


def overwriting() -> Any:
    return optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=1)


def clipping() -> Any:
    return optimizers.SGD(0.5, global_clipnorm=0.1)


def scaled_sgd() -> Any:
    return optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0)


LATE = X[:192].copy()
LATE[96] = np.inf  # the second batch, second replica

OPTIMIZERS = [
    Update(
        "ema-overwrite",
        "`ema_overwrite_frequency`, two replicas",
        by_fit,
        problem(rows(128), optimizer=overwriting),
        plain_says="merge_call",
    ),
    Update(
        "slots-in-the-step",
        "Custom loop of the tutorials with Adam: its slots are made in `strategy.run`, which "
        "works from Keras 3.16 on",
        loop(divided_by(64), build_optimizer=False),
        problem(rows(128), optimizer=optimizers.Adam),
        links=("k#19246", "k#23087"),
        plain_says="placeholder",
    ),
    Update(
        "clip-global_clipnorm",
        "`global_clipnorm` set on the optimizer",
        by_fit,
        problem(rows(128), optimizer=clipping),
        links=("tf#33929",),
    ),
    Update(
        "loss-scale-second",
        "`LossScaleOptimizer` in `fit`: a gradient overflows on the second replica only",
        by_fit,
        problem((LATE, Y[:192]), optimizer=scaled_sgd),
    ),
]


# Accumulation, and repeated ids -------------------------------------------------------------------


def accumulated(of_whole_batches: Problem) -> Weights:
    """Two halves of each batch, which Keras adds."""
    optimizer = functools.partial(optimizers.SGD, 0.1, gradient_accumulation_steps=2)
    arrays = tuple(map(np.concatenate, zip(*of_whole_batches.batches, strict=True)))
    return by_fit(problem(arrays, 32, optimizer=optimizer))


def of_ids(replicas: int) -> Problem:
    ids = np.random.default_rng(9).integers(0, 5, (128, 6)).astype("int32")
    build = lambda: embedding(keras.layers.Flatten())  # noqa: E731
    adam = lambda: optimizers.Adam(1e-2)  # noqa: E731
    return problem((ids, Y[:128]), build=build, optimizer=adam, replicas=replicas)


GRADIENTS = [
    Update(
        "accumulate-on-replicas",
        "`gradient_accumulation_steps` in `fit`, two replicas",
        accumulated,
        EVEN,
        EVEN.replace(options={"micro_batches": 2}),
        links=("k#17429", "tf-keras#301", "tf#32176"),
        plain_says="merge_call",
    ),
    Update(
        "embedding-adam",
        "Embedding, ids repeated in a batch, Adam: repeated rows are not summed, wrong on one "
        "device too",
        by_fit,
        of_ids(replicas=1),
        of_ids(replicas=2),
        links=("k#19992", "tf#28090"),
    ),
]


# Scopes -------------------------------------------------------------------------------------------


def outside_in_fit() -> Difference:
    strategy = mirrored(2)
    training = fresh(EVEN)
    model = training.model
    model.compile(training.optimizer, training.loss)
    model.fit(dataset_of(EVEN), verbose=0, shuffle=False)
    held = len(strategy.experimental_local_results(model.weights[0].value))
    return Difference(2 - held, "replicas that do nothing")


def refused() -> Difference:
    training = fresh(EVEN)
    tmg.make_train_step(training.model, training.optimizer, training.loss, strategy_of(2))
    return Difference(0.0)


SCOPES = [
    Case(
        name="scope-everything",
        section="Optimizers, clipping, accumulation, precision",
        title="`fit`: model and optimizer were created outside the scope",
        plain=outside_in_fit,
        ours=refused,
        ours_kind="error",
        ours_says="ScopeError: The model was created outside the scope",
        reason="nothing is computed that could be wrong: the error names the line that is missing",
        links=("tf#26020",),
    ),
]

CASES = [*LOOPS, *FITS, *NO_ROWS, *OPTIMIZERS, *GRADIENTS, *SCOPES]
