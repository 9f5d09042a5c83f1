"""Workers must train one program: what counts as a difference, and what must never count as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import worker_programs
from law.processes import Worker, call_all, pool
from problems import network

from tfmultigpu.steps.agreement import describe


def dense(activation: Any = "relu", **options: Any) -> Any:
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(3, activation, **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def wired(swapped: bool) -> Any:
    inputs = keras.Input((2,))
    both = [keras.layers.Dense(2)(inputs), inputs]
    return keras.Model(inputs, keras.layers.Subtract()(both[::-1] if swapped else both))


def normalized(mean: float) -> Any:
    return network(2, keras.layers.Normalization(mean=mean, variance=1))


class Own(keras.layers.Layer):
    """A layer without a configuration."""

    def __init__(self, argument: float) -> None:
        super().__init__()
        self.argument = argument

    def call(self, inputs: Any) -> Any:
        return inputs * 2.0


def own(argument: float) -> Any:
    return network(2, Own(argument))


def scaled(factor: float) -> Callable[[Any, Any], Any]:
    return lambda y_true, y_pred: factor * (y_true - y_pred) ** 2


def with_global(value: float) -> Any:
    """A function that reads a number of its module."""
    scope: dict[str, Any] = {"WEIGHT": value}
    exec("def loss(y_true, y_pred):\n    return WEIGHT * (y_true - y_pred)", scope)
    return scope["loss"]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "activation": (dense, lambda: dense("tanh")),
    "regularizer": (dense, lambda: dense(kernel_regularizer="l2")),
    "dtype": (dense, lambda: dense(dtype="float16")),
    "lambda": (lambda: dense(lambda x: x * 2.0), lambda: dense(lambda x: x * 3.0)),
    "wiring": (lambda: wired(False), lambda: wired(True)),
    "argument": (lambda: own(1.0), lambda: own(2.0)),
    "constant": (lambda: normalized(0.0), lambda: normalized(1.0)),
}  # fmt: skip


# Fails if two models that compute something else are taken for one, or two of one program for two:
# layers and models have been counted up since.
def test_models_that_compute_something_else_are_described_differently(
    subtests: pytest.Subtests,
) -> None:
    for name, (one, other) in MODELS.items():
        with subtests.test(name):
            first = describe(one())
            assert describe(one()) == first, name
            assert describe(other()) != first, name
    model = dense()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = describe(model), describe(model.optimizer)
    model.predict(np.ones((3, 2)), verbose=0)
    model.fit(np.ones((3, 2)), np.ones((3, 1)), verbose=0)
    assert (describe(model), describe(model.optimizer)) == before, "it was only used"
    model.layers[1].trainable = False
    assert describe(model) != before[0]


VALUES: dict[str, tuple[Any, Any]] = {
    "a number": (0.5, 0.25),
    "a type": (1, 1.0),
    "code": (lambda y, p: y - p, lambda y, p: y + p),
    "a constant": (lambda y, p: 2 * (y - p), lambda y, p: 3 * (y - p)),
    "a name": (lambda y, p: tf.abs(y - p), lambda y, p: tf.square(y - p)),
    "a closure": (scaled(1.0), scaled(2.0)),
    "a global": (with_global(0.5), with_global(0.25)),
    "a metric": (
        keras.metrics.BinaryAccuracy(threshold=0.5),
        keras.metrics.BinaryAccuracy(threshold=0.6),
    ),
    "a default": (lambda y, p, a=1: a * (y - p), lambda y, p, a=2: a * (y - p)),
    "a partial": (functools.partial(scaled, 1.0), functools.partial(scaled, 2.0)),
    "its reduction": (keras.losses.Huber(), keras.losses.Huber(reduction="sum")),
    "momentum": (keras.optimizers.SGD(momentum=0.1), keras.optimizers.SGD(momentum=0.2)),
    "clipping": (keras.optimizers.SGD(), keras.optimizers.SGD(clipnorm=1.0)),
    "a schedule": (
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
        keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 20, 0.9)),
    ),
    "an array": (np.zeros(2), np.ones(2)),
    "an order": ([1, 2], [2, 1]),
    "a tf.function": (tf.function(lambda x: x + 1), tf.function(lambda x: x + 2)),
}  # fmt: skip


def test_values_that_mean_something_else_are_described_differently(
    subtests: pytest.Subtests,
) -> None:
    for name, (one, other) in VALUES.items():
        with subtests.test(name):
            assert describe(one) == describe(one), name
            assert describe(one) != describe(other), name


def test_a_function_may_call_one_that_is_defined_later() -> None:
    def first() -> Any:
        return later() * factor

    before = describe(first)
    factor = 2.0

    def later() -> float:
        return 1.0

    assert later() == 1.0
    assert describe(first) != before  # It has a number now.
    factor = 3.0
    assert describe(first) != before


def test_what_differs_between_processes_is_not_in_a_description() -> None:
    class Mine:
        """An object whose `repr` is its address."""

    assert describe(Mine()) == describe(Mine())
    assert describe({"name": "dense_1", "rate": 1}) == describe({"name": "x", "rate": 1})
    assert describe({"a": 1, "b": 2}) == describe({"b": 2, "a": 1})
    assert describe(keras.layers.Dropout(0.5, seed=1)) == describe(
        keras.layers.Dropout(0.5, seed=2)
    )
    assert describe(keras.optimizers.SGD()) == describe(keras.optimizers.SGD())


# Between workers ----------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[list[Worker]]:
    """Two workers that have not joined yet."""
    workers = pool().cluster(2)
    yield workers
    for worker in workers:
        worker.end()


@pytest.mark.slow
def test_two_workers_that_train_another_program_are_told(pair: Any, tmp_path: Path) -> None:
    found = call_all(pair, worker_programs.told_of_other_programs, str(tmp_path))
    for number, told in enumerate(found):
        assert told["alike"] == told["alike again"] == "trained"
        for name, part, values in [
            ("activation", "model", ("activation: 'relu'", "activation: 'tanh'")),
            ("function", "loss", ("<lambda>", "<lambda>")),
        ]:
            text = told[name]
            assert text.startswith(f"The workers train with a different {part}, so"), text
            assert values[number] in text, text
            assert f"on worker {number}, and another on worker {1 - number}. Run the same" in text
        for name in ("weights in fit", "weights in evaluate"):
            assert told[name].startswith("The workers begin with different values of ")
            assert "bias, and would train two models" in told[name]
            assert f"add up to {0.5 if number == 0 else 0:g} on worker {number}" in told[name]
        assert "momentum" in told["moments"]
        assert "to 7 on worker 1" in told["moments"]
        assert told["calls"].startswith("The workers do not call the same things in the same")
        assert "Every worker must make the same steps" in told["calls"]


# Fails if rows or gradients do not find their way to the other worker and back.
@pytest.mark.slow
def test_a_loss_over_all_rows_on_two_workers(pair: list[Worker]) -> None:
    call_all(pair, worker_programs.hold_a_loss_over_all_rows)
