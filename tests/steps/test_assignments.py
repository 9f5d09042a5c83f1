"""What layers and metrics assign is deferred until all checks have passed, and read meanwhile.

Of a step that raises, the plain checks are in tests/promises/test_failing_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases.case import Case, hold
from law.model import Training
from one_device import as_dataset, cut, step_on, strategy_of
from problems import network, networks, normal_rows

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.steps.assignments import DeferredAssignments

X, Y = normal_rows(16, 4, 2, seed=41)
X[:, 0] = 0  # Which check fails: that of this number, for any row.
SIZES = (7, 6, 5)
BATCH = X[:7], Y[:7]
SQUARES = keras.losses.MeanSquaredError()


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)


def refuse(asked: Any, text: str) -> Any:
    return tf.debugging.Assert(~asked, [text])


def raise_if(asked: Any) -> Any:
    if asked:
        raise FloatingPointError("Python code")
    return np.float32(0)


@tf.function
def checking(asked: Any) -> None:
    refuse(asked, "in a function of the layer")


def in_a_branch(asked: Any) -> None:
    tf.cond(asked, lambda: (refuse(asked, "in a branch"), 1)[1], lambda: 0)


class CheckedSum(keras.metrics.Sum):
    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        refuse(is_asked(values, "metric of a layer"), "metric of a layer")
        return super().update_state(values)


# Checks whose results nobody uses, and what is said.
UNUSED: dict[str, Any] = {
    "in a branch": in_a_branch,
    "in a function of the layer": checking,
    "not finite": lambda asked: tf.debugging.check_numerics(
        1.0 / (1.0 - tf.cast(asked, tf.float32)), "not finite"
    ),
    "Python code": lambda asked: tf.numpy_function(raise_if, [asked], tf.float32),
    "metric of a layer": lambda asked: None,
}
# Operations that fail by themselves, of which a layer adds nothing to its output.
USED: dict[str, Any] = {
    "not invertible": lambda asked: tf.linalg.inv(tf.eye(2) * (1.0 - tf.cast(asked, tf.float32))),
    "memory": lambda asked: tf.random.uniform(
        tf.where(asked, tf.constant(2**45, tf.int64), 1)[None]
    ),
}
CHECKS = [*UNUSED, *USED]


def is_asked(inputs: Any, check: str) -> Any:
    return tf.reduce_any(tf.equal(inputs[:, 0], CHECKS.index(check) + 1.0))


class Checks(keras.layers.Layer):
    """Makes all checks, and assigns to a metric beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = CheckedSum()

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        self.seen.update_state(inputs)
        for name, check in UNUSED.items():
            check(is_asked(inputs, name))
        nothing = [tf.reduce_sum(f(is_asked(inputs, name))) * 0.0 for name, f in USED.items()]
        return inputs + 0.1 * keras.random.normal(tf.shape(inputs)) + sum(nothing)


class CheckedError(keras.metrics.MeanSquaredError):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        refuse(tf.reduce_any(y_true > 1e3), "metric of the step")
        return super().update_state(y_true, y_pred, sample_weight)


def checked() -> keras.Model:
    hidden = [keras.layers.Dense(3, kernel_regularizer="l2"), keras.layers.BatchNormalization()]
    return network(4, Checks(), *hidden, keras.layers.Dropout(0.3), keras.layers.Dense(2))


def copies(step: Any) -> list[Any]:
    """Every copy of every variable that a step may change."""
    seeds = _compat.global_seeds()
    variables = step.changed_variables() + [v for metric in step.metrics for v in metric.variables]
    variables += [] if seeds is None else [seeds.state]
    values = [v.value if hasattr(v, "path") else v for v in variables]
    local = step.strategy.experimental_local_results
    return [copy for value in values for copy in local(value)]


def state(step: Any) -> list[np.ndarray]:
    return [copy.numpy() for copy in copies(step)]


def assert_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def train(step: Any, *checks: str | None) -> None:
    """Trains on batches; in the last row of each is what the check of that name looks for."""
    batches = []
    for size, check in zip(SIZES, checks, strict=False):
        x, y = X[:size].copy(), Y[:size].copy()
        if check == "metric of the step":
            y[-1] = 2e3
        elif check is not None:
            x[-1, 0] = CHECKS.index(check) + 1.0
        batches.append((x, y))
    step.run(iter(as_dataset(batches)), len(batches))


# Fails if something that a step assigns does not wait for a check on any replica, or if a batch
# that was refused leaves something for those after it.
def test_a_step_that_raises_has_changed_nothing() -> None:
    options = {"micro_batches": 3, "loss_scale": "dynamic", "verify": False}
    with strategy_of(2).scope():
        options["metrics"] = [CheckedError()]
    step = step_on(2, checked, sgd, "mse", **options)
    train(step, None)  # All that is made on the way is made now.
    start = state(step)
    train(step, None)
    after_good = state(step)
    train(step, None)
    at_the_end = state(step)
    for check in [*CHECKS, "metric of the step"]:
        for copy, value in zip(copies(step), start, strict=True):
            copy.assign(value)
        error = tmg.OutOfMemoryError if check == "memory" else tf.errors.OpError
        with pytest.raises(error, match=check):
            train(step, None, check, None)
        assert_equal(state(step), after_good)
        train(step, None)
        assert_equal(state(step), at_the_end)


# What is read meanwhile: as if it had been assigned -----------------------------------------------


def in_graph(function: Callable[[], Any]) -> Any:
    return tf.function(function, autograph=False)()


def test_what_an_inner_graph_assigns_is_assigned_at_once() -> None:
    count, total = keras.Variable(1.0, trainable=False), keras.Variable(0.0, trainable=False)

    def body(i: Any) -> Any:
        count.assign_add(1.0)
        total.assign_add(count)
        return i + 1

    def run() -> Any:
        with DeferredAssignments() as deferred:
            count.assign(10.0)
            tf.while_loop(lambda i: i < 3, body, [0])
            after = tf.convert_to_tensor(count)
            count.assign_add(100.0)
        return after, deferred.current(count), tf.identity(count.value)

    assert [float(value) for value in in_graph(run)] == [13.0, 113.0, 13.0]
    assert float(total.numpy()) == 11.0 + 12.0 + 13.0


def test_a_gradient_goes_to_a_variable_and_not_through_what_it_was_assigned() -> None:
    weight, state = keras.Variable(3.0), keras.Variable(2.0, trainable=False)

    def run() -> Any:
        with tf.GradientTape() as tape, DeferredAssignments():
            weight.assign(weight * 2.0)
            state.assign(state * weight)
            loss = weight * weight * state
        return loss, tape.gradient(loss, weight.value)

    assert [float(value) for value in in_graph(run)] == [6.0 * 6.0 * 12.0, 2 * 6.0 * 12.0]


# What it computes in one pass is that of one device: cases/layers.py.
def test_weights_that_each_micro_batch_assigns_once_more_are_told() -> None:
    def build() -> keras.Model:
        dense = keras.layers.Dense(3, kernel_regularizer="l2")
        return network(4, keras.layers.SpectralNormalization(dense), keras.layers.Dense(2))

    step = step_on(2, build, sgd, SQUARES, micro_batches=3)
    with pytest.warns(tmg.ReplicaDependenceWarning, match=r"Write micro_batches=1"):
        step(BATCH)


class DrawsInABranch(keras.layers.Layer):
    """Draws where nothing can be held back: a second micro-batch draws what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def call(self, x: Any, training: bool = False) -> Any:
        return tf.cond(tf.norm(x) > 0, lambda: self.dropout(x, training=training), lambda: x)


def test_what_is_drawn_in_a_branch_is_exact_or_told_with_micro_batches() -> None:
    build = networks(4, DrawsInABranch, lambda: keras.layers.Dense(2))
    case = Case("a branch", lambda: Training(build(), sgd(), SQUARES), cut((X, Y), (7, 1, 5, 2)))
    hold(case.replace(options={"verify": False}))
    with pytest.warns(tmg.ReplicaDependenceWarning, match="Write micro_batches=1"):
        step_on(2, build, sgd, SQUARES, micro_batches=2)(BATCH)
