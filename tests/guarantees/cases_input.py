"""Input."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import tensorflow as tf
from guarantee import Case, Difference
from one_device import strategy_of
from recipes import (
    Problem,
    compiled,
    crossentropy,
    divided_by,
    fresh,
    mirrored,
    rows,
)

import tfmultigpu as tmg

Input = functools.partial(Case, section="Input")
EVEN = Problem(rows(128))


# Where data ends ----------------------------------------------------------------------------------


def endless_fit() -> Difference:
    model = compiled(EVEN, mirrored(2))
    model.fit(EVEN.dataset().repeat(), epochs=2, verbose=0)
    return Difference(0.0)


def endless_evaluate() -> Difference:
    model = compiled(EVEN, strategy_of(2))
    tmg.evaluate(model, EVEN.dataset().repeat())
    return Difference(0.0)


def counted_beyond_the_end() -> Difference:
    strategy = mirrored(2)
    problem = Problem(rows(192), 16)
    with strategy.scope():
        model, optimizer = fresh(problem)
        optimizer.build(model.trainable_variables)

    def train_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = divided_by(16)(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def five(iterator: Any) -> None:
        for _ in tf.range(5):
            strategy.run(train_step, args=next(iterator))

    iterator = iter(strategy.experimental_distribute_dataset(problem.dataset()))
    try:
        for _ in itertools.count():
            five(iterator)
    except tf.errors.OutOfRangeError:
        pass
    return Difference(int(optimizer.iterations.numpy()) - 12, "steps counted that never ran")


def counted_by_run() -> Difference:
    strategy = strategy_of(2)
    problem = Problem(rows(192), 16)
    with strategy.scope():
        model, optimizer = fresh(problem)
    step = tmg.make_train_step(model, optimizer, crossentropy(), strategy)
    iterator = iter(tmg.distribute_dataset(problem.dataset(), strategy))
    while int(step.run(iterator, 5)["steps"]):
        pass
    return Difference(int(optimizer.iterations.numpy()) - 12, "steps counted that never ran")


ENDS = [
    Input(
        name="endless",
        title="`.repeat()` without a number of steps (`fit`; `tfmultigpu.evaluate`)",
        plain=endless_fit,
        ours=endless_evaluate,
        ours_kind="error",
        ours_says="DataError",
        reason="how far to read cannot be guessed",
        patience=12.0,
    ),
    Input(
        name="end-inside-a-function",
        title="Five steps in one `tf.function`, where the data ends after twelve: "
        "`optimizer.iterations`",
        plain=counted_beyond_the_end,
        ours=counted_by_run,
    ),
]

CASES = ENDS
