"""Optimizers, clipping, accumulation, precision."""

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
    weights_of,
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


def schedule() -> Any:
    return optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)


def scheduled_and_accumulated() -> Any:
    return optimizers.SGD(schedule(), gradient_accumulation_steps=2)


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


def of_keras(problem: Problem, truth: Problem) -> Any:
    """Keras accumulates on one device; the truth is one large batch for each window."""
    return lambda: weights(by_fit(problem.replace(replicas=1)), one_device(truth))


def in_parts(problem: Problem) -> Any:
    return against_one_device(by_step, problem.replace(options={"micro_batches": 2}))


def windows(count: int, small: int, window: int) -> Difference:
    """Our accumulator over small batches; the last window is short and counts as what it is."""
    strategy = strategy_of(2)
    truth = Problem(rows(count), small * window)
    with strategy.scope():
        model, optimizer = fresh(truth)
        optimizer.build(model.trainable_variables)
        accumulator = tmg.GradientAccumulator(model.trainable_variables)

    def add(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            pair = tmg.loss_sum(crossentropy(), y, model(x, training=True))
        accumulator.add(tape.gradient(pair.sum, model.trainable_variables), pair.weight)

    def update() -> None:
        gradients, _ = accumulator.reduce()
        tmg.apply_reduced_gradients(optimizer, gradients, model.trainable_variables)

    add_batch = tf.function(lambda batch: strategy.run(add, args=batch))
    apply_window = tf.function(update)
    for batch in tmg.distribute_dataset(rows(count), strategy, batch_size=small):
        add_batch(batch)
        if accumulator.count == window:
            apply_window()
    if accumulator.count:
        apply_window()
    return weights(Trained(weights_of(model, strategy)), one_device(truth))


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
    Update(
        name="accumulate-left-over",
        title="Keras accumulation on one device: 5 batches in windows of 2, the last one is short",
        plain=of_keras(Problem(rows(160), 32, optimizer=accumulated), Problem(rows(160))),
        ours=lambda: windows(160, 32, 2),
    ),
    Update(
        name="accumulate-schedule",
        title="Keras accumulation on one device with a learning-rate schedule",
        plain=of_keras(
            HALVES.replace(optimizer=scheduled_and_accumulated),
            EVEN.replace(optimizer=lambda: optimizers.SGD(schedule())),
        ),
        ours=in_parts(EVEN.replace(optimizer=lambda: optimizers.SGD(schedule()))),
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


def outside_optimizer_in_a_loop() -> Difference:
    strategy = mirrored(2)
    with strategy.scope():
        model, _ = fresh(EVEN)
    optimizer = optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = divided_by(64)(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda batch: strategy.run(train_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(EVEN.dataset()):
        run(batch)
    truth = one_device(EVEN.replace(optimizer=lambda: optimizers.SGD(0.1, momentum=0.9)))
    return weights(Trained(weights_of(model, strategy)), truth)


def refused(what: str) -> Any:
    def ours() -> Difference:
        strategy = strategy_of(2)
        model, optimizer = fresh(EVEN)
        with strategy.scope():
            inside = fresh(EVEN)
        model = inside[0] if what == "optimizer" else model
        tmg.make_train_step(model, optimizer, crossentropy(), strategy)
        return Difference(0.0)

    return ours


TOLD = "nothing is computed that could be wrong: the error names the line that is missing"
SCOPES = [
    Update(
        name="scope-optimizer",
        title="Custom loop: the optimizer was created outside the scope",
        plain=outside_optimizer_in_a_loop,
        ours=refused("optimizer"),
        ours_kind="error",
        ours_says="ScopeError: The optimizer was created outside the scope",
        reason=TOLD,
    ),
    Update(
        name="scope-everything",
        title="`fit`: model and optimizer were created outside the scope",
        plain=outside_in_fit,
        ours=refused("everything"),
        ours_kind="error",
        ours_says="ScopeError: The model was created outside the scope",
        reason=TOLD,
        links=("tf#26020",),
    ),
]

CASES = [*OPTIMIZERS, *CLIPPING, *PRECISION, *ACCUMULATION, *SPARSE, *SCOPES]
