"""Optimizers, clipping, accumulation, precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from guarantee import Case, Difference
from keras import optimizers
from one_device import strategy_of
from recipes import (
    Problem,
    Trained,
    X,
    Y,
    by_fit,
    by_loop,
    by_step,
    crossentropy,
    divided_by,
    fresh,
    mirrored,
    one_device,
    rows,
    weights,
)

import tfmultigpu as tmg

Update = functools.partial(Case, section="Optimizers, clipping, accumulation, precision")
EVEN = Problem(rows(128))


def against_one_device(
    train: Callable[[Problem], Trained], problem: Problem, **options: Any
) -> Any:
    return lambda: weights(train(problem), one_device(problem, **options))


# Float16 ------------------------------------------------------------------------------------------

LATE = X[:192].copy()
LATE[96] = np.inf  # the second batch, second replica


def scaled_sgd() -> Any:
    return optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0)


OVERFLOW = Problem((LATE, Y[:192]), optimizer=scaled_sgd)
PRECISION = [
    Update(
        name="loss-scale-second",
        title="`LossScaleOptimizer` in `fit`: a gradient overflows on the second replica only",
        plain=against_one_device(by_fit, OVERFLOW),
        ours=against_one_device(by_step, OVERFLOW),
    ),
]


# Clipping and the rest of the optimizers ----------------------------------------------------------

CLIPPED = EVEN.replace(optimizer=lambda: optimizers.SGD(0.5, global_clipnorm=0.1))
CLIPPING = [
    Update(
        name="clip-global_clipnorm",
        title="`global_clipnorm` set on the optimizer",
        plain=against_one_device(by_fit, CLIPPED),
        ours=against_one_device(by_step, CLIPPED),
        links=("tf#33929",),
    ),
]


def overwriting() -> Any:
    return optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=1)


OPTIMIZERS = [
    Update(
        name="ema-overwrite",
        title="`ema_overwrite_frequency`, two replicas",
        plain=against_one_device(by_fit, EVEN.replace(optimizer=overwriting)),
        ours=against_one_device(by_step, EVEN.replace(optimizer=overwriting)),
        plain_says="merge_call",
    ),
    Update(
        name="slots-in-the-step",
        title="Custom loop of the tutorials with Adam: its slots are made in `strategy.run`",
        plain=lambda: weights(
            by_loop(EVEN.replace(optimizer=optimizers.Adam), divided_by(64), build_optimizer=False),
            one_device(EVEN.replace(optimizer=optimizers.Adam)),
        ),
        ours=against_one_device(by_step, EVEN.replace(optimizer=optimizers.Adam)),
        links=("k#19246",),
        plain_says="placeholder",
    ),
]


# Accumulation -------------------------------------------------------------------------------------


def accumulated() -> Any:
    return optimizers.SGD(0.1, gradient_accumulation_steps=2)


def in_parts(problem: Problem) -> Any:
    return against_one_device(by_step, problem.replace(options={"micro_batches": 2}))


HALVES = Problem(rows(128), 32)
ACCUMULATION = [
    Update(
        name="accumulate-on-replicas",
        title="`gradient_accumulation_steps` in `fit`, two replicas",
        plain=lambda: weights(by_fit(HALVES.replace(optimizer=accumulated)), one_device(EVEN)),
        ours=in_parts(EVEN),
        links=("k#17429", "tf-keras#301", "tf#32176"),
        plain_says="merge_call",
    ),
]


# Repeated ids -------------------------------------------------------------------------------------

IDS = np.random.default_rng(9).integers(0, 5, (128, 6)).astype("int32")


def embedding() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(9, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


REPEATED = Problem(
    (IDS, Y[:128]), build=embedding, optimizer=lambda: optimizers.Adam(1e-2), replicas=1
)
SPARSE = [
    Update(
        name="embedding-adam",
        title="Embedding, ids repeated in a batch, Adam, even on one device: repeated rows are not "
        "summed",
        plain=against_one_device(by_fit, REPEATED),
        ours=against_one_device(by_step, REPEATED.replace(replicas=2)),
        links=("k#19992", "tf#28090"),
    ),
]


# Scopes -------------------------------------------------------------------------------------------


def outside_in_fit() -> Difference:
    strategy = mirrored(2)
    model, optimizer = fresh(EVEN)
    model.compile(optimizer, crossentropy())
    model.fit(EVEN.dataset(), verbose=0, shuffle=False)
    held = len(strategy.experimental_local_results(model.weights[0].value))
    return Difference(2 - held, "replicas that do nothing")


def refused() -> Difference:
    model, optimizer = fresh(EVEN)
    tmg.make_train_step(model, optimizer, crossentropy(), strategy_of(2))
    return Difference(0.0)


SCOPES = [
    Update(
        name="scope-everything",
        title="`fit`: model and optimizer were created outside the scope",
        plain=outside_in_fit,
        ours=refused,
        ours_kind="error",
        ours_says="ScopeError: The model was created outside the scope",
        reason="nothing is computed that could be wrong: the error names the line that is missing",
        links=("tf#26020",),
    ),
]

CASES = [*OPTIMIZERS, *CLIPPING, *PRECISION, *ACCUMULATION, *SPARSE, *SCOPES]
