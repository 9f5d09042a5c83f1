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
EARLY = X[:192].copy()
EARLY[64] = np.inf  # the second batch, first replica


def scaled_sgd() -> Any:
    return optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=1024.0)


def overflow(features: Any) -> Problem:
    return Problem((features, Y[:192]), optimizer=scaled_sgd)


NAN_IN_PART = X[:128].copy()
NAN_IN_PART[3] = np.nan  # the first of two micro-batches


def scaled_and_accumulated() -> Any:
    inner = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)


PRECISION = [
    Update(
        name=f"loss-scale-{name}",
        title=f"`LossScaleOptimizer` in `fit`: a gradient overflows on {where} replica only",
        plain=against_one_device(by_fit, overflow(features)),
        ours=against_one_device(by_step, overflow(features)),
    )
    for name, where, features in (("second", "the second", LATE), ("first", "the first", EARLY))
]
PRECISION.append(
    Update(
        name="loss-scale-micro-batch",
        title="NaN in one of two micro-batches under loss scaling (Keras: on one device)",
        plain=lambda: weights(
            by_fit(
                Problem((NAN_IN_PART, Y[:128]), 32, optimizer=scaled_and_accumulated, replicas=1)
            ),
            one_device(Problem((NAN_IN_PART, Y[:128]), optimizer=scaled_sgd)),
        ),
        ours=against_one_device(
            by_step,
            Problem((NAN_IN_PART, Y[:128]), optimizer=scaled_sgd, options={"micro_batches": 2}),
        ),
        replicas=1,
    )
)


# Clipping and the rest of the optimizers ----------------------------------------------------------

CLIPS = {
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.5, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.005),
}
CLIPPING = [
    Update(
        name=f"clip-{name}",
        title=f"`{name}` set on the optimizer",
        plain=against_one_device(by_fit, EVEN.replace(optimizer=make)),
        ours=against_one_device(by_step, EVEN.replace(optimizer=make)),
        links=("tf#33929",),
    )
    for name, make in CLIPS.items()
]


def constrained() -> Any:
    constraint = keras.constraints.MaxNorm(0.5)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_constraint=constraint),
            keras.layers.Dense(4),
        ]
    )


def schedule() -> Any:
    return optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)


def scheduled_and_accumulated() -> Any:
    return optimizers.SGD(schedule(), gradient_accumulation_steps=2)


def overwriting() -> Any:
    return optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=1)


def with_averages(train: Callable[[Problem], Trained]) -> Callable[[Problem], Trained]:
    """``fit`` ends by writing the averages into the weights; so do the others, here."""

    def averaged(problem: Problem) -> Trained:
        made: dict[str, Any] = {}

        def keep(name: str, value: Any) -> Any:
            made[name] = value
            return value

        found = train(
            problem.replace(
                build=lambda: keep("model", problem.build()),
                optimizer=lambda: keep("optimizer", problem.optimizer()),
            )
        )
        model = made["model"]
        made["optimizer"].finalize_variable_values(model.trainable_variables)
        strategy = model.weights[0].value.distribute_strategy if len(found.weights) > 1 else None
        return Trained(weights_of(model, strategy), found.losses, found.iterations)

    return averaged


OPTIMIZERS = [
    Update(
        name="ema-overwrite",
        title="`ema_overwrite_frequency`, two replicas",
        plain=against_one_device(
            by_fit,
            EVEN.replace(optimizer=overwriting),
        ),
        ours=against_one_device(
            by_step,
            EVEN.replace(optimizer=overwriting),
        ),
        alone=True,
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
        alone=True,
    ),
]


# Accumulation -------------------------------------------------------------------------------------


def accumulated(**options: Any) -> Callable[[], Any]:
    return lambda: optimizers.SGD(
        options.pop("learning_rate", 0.1), gradient_accumulation_steps=2, **options
    )


def averaging() -> Any:
    return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


def of_keras(problem: Problem, truth: Problem, right: Any = one_device) -> Any:
    """Keras accumulates on one device; the truth is one large batch for each window."""
    return lambda: weights(by_fit(problem.replace(replicas=1)), right(truth))


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
    return weights(Trained(weights_of(model, strategy), []), one_device(truth))


HALVES = Problem(rows(128), 32)
ACCUMULATION = [
    Update(
        name="accumulate-on-replicas",
        title="`gradient_accumulation_steps` in `fit`, two replicas",
        plain=lambda: weights(by_fit(HALVES.replace(optimizer=accumulated())), one_device(EVEN)),
        ours=in_parts(EVEN),
        links=("k#17429", "tf-keras#301", "tf#32176"),
        plain_says="merge_call",
        alone=True,
    ),
    Update(
        name="accumulate-left-over",
        title="Keras accumulation on one device: 5 batches in windows of 2, the last one is short",
        plain=of_keras(Problem(rows(160), 32, optimizer=accumulated()), Problem(rows(160))),
        ours=lambda: windows(160, 32, 2),
        replicas=1,
    ),
    Update(
        name="accumulate-ragged",
        title="Keras accumulation on one device: micro-batches of 64 and 36 rows",
        plain=of_keras(Problem(rows(100), optimizer=accumulated()), Problem(rows(100), 100)),
        ours=lambda: windows(100, 64, 2),
        replicas=1,
    ),
    Update(
        name="accumulate-ema",
        title="Keras accumulation on one device with moving averages",
        plain=of_keras(
            Problem(rows(192), 32, optimizer=accumulated(use_ema=True, ema_momentum=0.5)),
            Problem(rows(192), optimizer=averaging),
            with_averages(one_device),
        ),
        ours=lambda: weights(
            with_averages(by_step)(
                Problem(rows(192), optimizer=averaging, options={"micro_batches": 2})
            ),
            with_averages(one_device)(Problem(rows(192), optimizer=averaging)),
        ),
        replicas=1,
    ),
    Update(
        name="accumulate-schedule",
        title="Keras accumulation on one device with a learning-rate schedule",
        plain=of_keras(
            HALVES.replace(optimizer=scheduled_and_accumulated),
            EVEN.replace(optimizer=lambda: optimizers.SGD(schedule())),
        ),
        ours=in_parts(EVEN.replace(optimizer=lambda: optimizers.SGD(schedule()))),
        replicas=1,
    ),
    Update(
        name="accumulate-constraint",
        title="Keras accumulation on one device with a constraint on a kernel",
        plain=of_keras(
            HALVES.replace(optimizer=accumulated(), build=constrained),
            EVEN.replace(build=constrained),
        ),
        ours=in_parts(EVEN.replace(build=constrained)),
        replicas=1,
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


REPEATED = {
    "adam": ("Adam", lambda: optimizers.Adam(1e-2)),
    "rmsprop": ("RMSprop", lambda: optimizers.RMSprop(1e-2)),
    "clip": ("`global_clipnorm`", lambda: optimizers.SGD(0.5, global_clipnorm=0.05)),
}
SPARSE = [
    Update(
        name=f"embedding-{name}",
        title=f"Embedding, ids repeated in a batch, {title}, even on one device: repeated rows "
        "are not summed",
        plain=lambda make=make: weights(
            by_fit(Problem((IDS, Y[:128]), build=embedding, optimizer=make, replicas=1)),
            one_device(Problem((IDS, Y[:128]), build=embedding, optimizer=make)),
        ),
        ours=against_one_device(by_step, Problem((IDS, Y[:128]), build=embedding, optimizer=make)),
        links=("k#19992", "tf#28090"),
        replicas=1,
    )
    for name, (title, make) in REPEATED.items()
]


# Scopes -------------------------------------------------------------------------------------------


def outside(what: str) -> Any:
    """Keras ``fit`` with something created outside the scope."""

    def plain() -> Difference:
        strategy = mirrored(2)
        model, optimizer = fresh(EVEN)
        if what == "everything":
            model.compile(optimizer, crossentropy())
        else:
            with strategy.scope():
                model.compile(EVEN.optimizer(), crossentropy())
        model.fit(EVEN.dataset(), verbose=0, shuffle=False)
        if what == "everything":
            held = len(strategy.experimental_local_results(model.weights[0].value))
            return Difference(2 - held, "replicas that do nothing")
        return weights(Trained(weights_of(model, strategy), []), one_device(EVEN))

    return plain


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
    return weights(Trained(weights_of(model, strategy), []), truth)


def refused(what: str) -> Any:
    def ours() -> Difference:
        strategy = strategy_of(2)
        model, optimizer = fresh(EVEN)
        with strategy.scope():
            inside = fresh(EVEN)
        model = inside[0] if what == "optimizer" else model
        optimizer = inside[1] if what == "model" else optimizer
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
        alone=True,
    ),
    Update(
        name="scope-everything",
        title="`fit`: model and optimizer were created outside the scope",
        plain=outside("everything"),
        ours=refused("everything"),
        ours_kind="error",
        ours_says="ScopeError: The model was created outside the scope",
        reason=TOLD,
        links=("tf#26020",),
    ),
    Update(
        name="scope-model",
        title="`fit`: the model was created outside the scope, `compile` called inside",
        plain=outside("model"),
        ours=refused("model"),
        ours_kind="error",
        ours_says="ScopeError: The model was created outside the scope",
        reason=TOLD,
        alone=True,
    ),
]

CASES = [*OPTIMIZERS, *CLIPPING, *PRECISION, *ACCUMULATION, *SPARSE, *SCOPES]
