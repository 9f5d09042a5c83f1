"""What a step says that is traced at each call, or for long: what changes, and how long."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on
from problems import network, networks

import tfmultigpu as tmg
from tfmultigpu.steps import pace
from tfmultigpu.steps.retraces import Retraces

X, Y = np.ones((9, 4), "float32"), np.ones((9, 4), "float32")


def warned(call: Callable[[int], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(6):
            call(number)
    return [str(one.message) for one in found]


# Fails if layers that freeze in turn make each step slow without a word.
def test_layers_that_freeze_in_turn_are_named() -> None:
    build = networks(4, *[lambda: keras.layers.Dense(4)] * 6)
    step = step_on(2, build, keras.optimizers.SGD, "mse", verify=False)

    def freeze(number: int) -> None:
        for other, layer in enumerate(step.model.layers):
            layer.trainable = other != number
        step((X, Y))

    (message,) = warned(freeze)
    assert "the trained variables, without ['" in message
    assert "variables=..." in message


# Fails if iterators of another type each time, of which a trace takes in nothing else, say nothing.
def test_iterators_of_another_type_each_time_are_named() -> None:
    model = network(4, keras.layers.Dense(1))
    step = tmg.make_eval_step(model, "mse", tf.distribute.get_strategy(), verify=False)

    def evaluate(number: int) -> None:
        data = tf.data.Dataset.from_tensors((X[: number + 1], Y[: number + 1, :1]))
        step.run(iter(data), 1)

    (message,) = warned(evaluate)
    assert "from" in message


# Fails if a step is said to be slow whose traces are used again, or if that is said twice.
def test_only_traces_in_a_row_count_and_it_is_said_once() -> None:
    retraces = Retraces()

    def call(number: int, fact: int | None) -> None:
        with retraces.watch():
            if fact is not None:
                retraces.note({"optimizer.rho": fact / 8})

    assert not warned(lambda number: call(number, number))[1:]
    assert not warned(lambda number: call(number, number))
    retraces = Retraces()
    for _ in range(3):
        assert not warned(lambda number: call(number, number if number else None))


class Waits(keras.layers.Layer):
    """A layer whose code takes a while in Python."""

    def call(self, x: Any) -> Any:
        time.sleep(0.1)
        return x


# Fails if a first step that takes long does not say why, for how many seconds, and what leaves the
# check out; or if it says it in parts, or once more for the next step.
def test_a_long_first_step_says_how_long_and_what_leaves_the_check_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pace, "_SECONDS", 0.01)
    monkeypatch.setattr(pace, "_said", set())
    build = networks(4, Waits, lambda: keras.layers.Dense(4))
    with caplog.at_level(logging.WARNING, "tfmultigpu"):
        for _ in range(2):
            step_on(2, build, keras.optimizers.SGD, "mse")((X, Y))
    so_far, in_all = (record.getMessage() for record in caplog.records)
    assert so_far.startswith("The first step takes longer, because TensorFlow makes a graph")
    assert so_far.endswith(": 0 s so far. To leave the check out, write verify=False.")
    assert "for 2 replica(s), and the check computes some rows on one device: " in in_all
    assert in_all.endswith(" s in all.")

    caplog.clear()
    with caplog.at_level(logging.WARNING, "tfmultigpu"):
        step_on(2, build, keras.optimizers.SGD, "mse", verify=False)((X, Y))
    so_far, in_all = (record.getMessage() for record in caplog.records)
    assert so_far.startswith("The first step with a new kind of batch takes longer")
    assert so_far.endswith(": 0 s so far.")
    assert in_all.endswith(" s in all.")
