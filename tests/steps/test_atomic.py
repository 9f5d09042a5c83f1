"""A step that raises has changed nothing, also where the check is out of sight or comes last.

The plain checks are in tests/promises/test_failing_step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import Replicated, as_dataset, strategy_of

import tfmultigpu as tmg
from tfmultigpu import _compat

_random = np.random.default_rng(41)
X = _random.normal(size=(16, 4)).astype("float32")
X[:, 0] = 0  # Which check fails: that of this number, for any row.
Y = _random.normal(size=(16, 2)).astype("float32")
SIZES = (7, 6, 5)
CHECKS = [
    "assert in a branch",
    "assert in a function of the layer",
    "numbers that are not finite",
    "Python code",
    "matrix without inverse",
    "metric of a layer",
    "memory",
]
TEXTS = {"matrix without inverse": "not invertible"}


def is_asked(inputs: Any, check: str) -> Any:
    return tf.reduce_any(tf.equal(inputs[:, 0], CHECKS.index(check) + 1.0))


def refuse(asked: Any, text: str) -> Any:
    return tf.debugging.Assert(~asked, [text])


def raise_if(asked: Any) -> Any:
    if asked:
        raise FloatingPointError("Python code")
    return np.float32(0)


@tf.function
def checking(asked: Any) -> None:
    refuse(asked, "assert in a function of the layer")


class CheckedSum(keras.metrics.Sum):
    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        refuse(is_asked(values, "metric of a layer"), "metric of a layer")
        return super().update_state(values)


class Checks(keras.layers.Layer):
    """Checks whose results nobody uses, and what a layer may assign beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = CheckedSum()

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        self.seen.update_state(inputs)
        branch = is_asked(inputs, "assert in a branch")
        tf.cond(branch, lambda: (refuse(branch, "assert in a branch"), 1)[1], lambda: 0)
        checking(is_asked(inputs, "assert in a function of the layer"))
        asked = tf.cast(is_asked(inputs, "numbers that are not finite"), tf.float32)
        tf.debugging.check_numerics(1.0 / (1.0 - asked), "numbers that are not finite")
        tf.numpy_function(raise_if, [is_asked(inputs, "Python code")], tf.float32)
        singular = 1.0 - tf.cast(is_asked(inputs, "matrix without inverse"), tf.float32)
        nothing = tf.reduce_sum(tf.linalg.inv(tf.eye(2) * singular)) * 0.0
        size = tf.where(is_asked(inputs, "memory"), tf.constant(2**45, tf.int64), 1)
        nothing += tf.reduce_sum(tf.random.uniform(size[None])) * 0.0
        return inputs + 0.1 * keras.random.normal(tf.shape(inputs)) + nothing


class CheckedError(keras.metrics.MeanSquaredError):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        refuse(tf.reduce_any(y_true > 1e3), "metric of the step")
        return super().update_state(y_true, y_pred, sample_weight)


class Run:
    """A step, and all that it may change."""

    def __init__(self, replicas: int, **options: Any) -> None:
        strategy = strategy_of(replicas)
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [Checks(), keras.layers.Dense(3, kernel_regularizer="l2")]
            layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
            self.model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
            metric = CheckedError()
        self.step = tmg.make_train_step(
            self.model, self.optimizer, "mse", strategy, metrics=[metric], verify=False, **options
        )

    def copies(self) -> list[Any]:
        """Every copy of every variable."""
        seeds = _compat.global_seeds()
        found = [*self.model.variables, *self.optimizer.variables]
        found += [] if seeds is None else [seeds.state]
        for owner in (*self.step.metrics, *self.step.features):
            found += owner.variables
        local = self.step.strategy.experimental_local_results
        values = [v.value if hasattr(v, "path") else v for v in found]
        return [copy for value in values for copy in local(value)]

    def state(self) -> list[np.ndarray]:
        return [copy.numpy() for copy in self.copies()]

    def restore(self, state: Sequence[np.ndarray]) -> None:
        for copy, value in zip(self.copies(), state, strict=True):
            copy.assign(value)


def assert_equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def batches(*checks: str | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of some sizes; in the last row of each what the check of that name looks for."""
    made = []
    for size, check in zip(SIZES, checks, strict=False):
        x, y = X[:size].copy(), Y[:size].copy()
        if check == "metric of the step":
            y[-1] = 2e3
        elif check is not None:
            x[-1, 0] = CHECKS.index(check) + 1.0
        made.append((x, y))
    return made


# Fails if something that a step assigns does not wait for a check on any replica, or if a batch
# that was refused leaves something for those after it.
def test_a_step_that_raises_has_changed_nothing() -> None:
    run = Run(2, micro_batches=3, loss_scale="dynamic")

    def train(step: Any, made: Any) -> None:
        step.run(iter(as_dataset(made)), len(made))

    train(run.step, batches(None))  # All that is made on the way is made now.
    start = run.state()
    train(run.step, batches(None))
    after_good = run.state()
    train(run.step, batches(None))
    at_the_end = run.state()
    for check in [*CHECKS, "metric of the step"]:
        run.restore(start)
        error = tmg.OutOfMemoryError if check == "memory" else tf.errors.OpError
        with pytest.raises(error, match=TEXTS.get(check, check)):
            train(run.step, batches(None, check, None))
        assert_equal(run.state(), after_good)
        train(run.step, batches(None))
        assert_equal(run.state(), at_the_end)


def doubled_if_asked(inputs: Any) -> Any:
    """Makes two rows of each, which the loss then has values for, where a row asks for that."""
    asked = tf.cast(tf.reduce_any(tf.equal(inputs[:, 0], 1.0)), tf.int32)
    return tf.ensure_shape(tf.tile(inputs, [1 + asked, 1]), [None, 4])


# Fails if the last check of all, of the sums of all replicas, comes after an update.
def test_another_number_of_losses_than_rows_is_seen_before_anything_is_assigned() -> None:
    def build() -> keras.Model:
        layers = [keras.layers.Lambda(doubled_if_asked), keras.layers.Dropout(0.3, seed=1)]
        return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])

    run = Replicated(3, build, lambda: keras.optimizers.SGD(0.05), "mse", micro_batches=2)
    run.step((X, Y[:, :1]))
    before = [variable.numpy() for variable in run.variables()]
    asking = X[:1].copy()
    asking[:, 0] = 1
    with pytest.raises(tmg.errors.LossError, match="did not return one value per row"):
        run.step((asking, Y[:1, :1]))
    assert_equal([variable.numpy() for variable in run.variables()], before)
