"""Windows: parts added up before one optimizer step give what the whole gives at once.

Inside a batch the parts are micro-batches; across batches a ``GradientAccumulator`` adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import EXACT, Case, cut, integers, normal
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.testing import Training
from tfmultigpu.testing.reference import OneDevice

# Windows of three batches: one row among many, fewer rows than replicas, and a short one to end.
WINDOW = 3
BATCH_SIZES = (7, 1, 9, 2, 5, 8, 3)

X = normal(40, 6)
Y = integers(4, 40)
W = np.random.default_rng(5).uniform(0.0, 2.0, 40).astype("float32")
W[7] = 0.0  # All the weight that the batch of one row has.
BATCHES = cut(X, Y, W, sizes=BATCH_SIZES)


def everything_that_counts() -> keras.optimizers.Optimizer:
    """Schedule, averages and weight decay go by the steps; a window must be one step to each."""
    return keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.7),
        momentum=0.9,
        weight_decay=0.05,
        use_ema=True,
        ema_momentum=0.6,
        ema_overwrite_frequency=2,
        global_clipnorm=0.4,
    )


def training(
    reduction: str = "sum_over_batch_size",
    optimizer: Callable[[], Any] = everything_that_counts,
    clip_norm: float | None = None,
) -> Training:
    constraint = keras.constraints.MaxNorm(0.8)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", kernel_constraint=constraint),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    return Training(model, optimizer(), loss, clip_norm=clip_norm)


def test_micro_batches_are_one_window() -> None:
    """What counts steps counts windows."""
    build = functools.partial(training, "mean_with_sample_weight", clip_norm=0.3)
    Case("windows", build, BATCHES, options={"micro_batches": 5}).hold()


# Across batches -----------------------------------------------------------------------------------


class Windows:
    """The loop of the documentation: adds batches, applies once for each window."""

    def __init__(self, replicas: int, build: Callable[[], Training], scale: float = 1.0) -> None:
        self.strategy = strategy_of(replicas)
        keras.utils.set_random_seed(0)
        with self.strategy.scope():
            self.ours = build()
            self.model, self.optimizer = self.ours.model, self.ours.optimizer
            self.optimizer.build(self.model.trainable_variables)
            self.accumulator = tmg.GradientAccumulator(self.model.trainable_variables)
        self.scale = tf.Variable(scale)
        self.skipped: list[bool] = []
        self._start = [variable.numpy() for variable in self._variables()]
        self.add_next = tf.function(self._add_next)
        self.apply_window = tf.function(self._apply_window)

    def _variables(self) -> list[Any]:
        return [*self.ours.variables().values(), self.scale]

    def train(self, batches: list[Any]) -> list[list[np.ndarray]]:
        """Trains from the start and returns all variables after each window."""
        for variable, value in zip(self._variables(), self._start, strict=True):
            variable.assign(value)
        self.skipped.clear()
        spec = tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in batches[0])
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
        iterator = iter(tmg.distribute_dataset(dataset, self.strategy))
        after = []
        for i in range(len(batches)):
            self.add_next(iterator)
            if (i + 1) % WINDOW == 0 or i + 1 == len(batches):
                self.skipped.append(not bool(self.apply_window()))
                after.append([variable.numpy() for variable in self.ours.variables().values()])
        return after

    def _add_next(self, iterator: Any) -> None:
        batch = next(iterator)
        self.strategy.run(self._add, args=(*batch, tmg.data.row_weight(batch, self.strategy)))

    def _add(self, x: Any, y: Any, weight: Any, row_weight: Any) -> None:
        with tf.GradientTape() as tape:
            y_pred = self.model(x, training=True)
            pair = tmg.loss_sum(self.ours.loss, y, y_pred, weight, row_weight=row_weight)
            scaled = pair.sum * self.scale
        gradients = tape.gradient(scaled, self.model.trainable_variables)
        self.accumulator.add(gradients, pair.weight)

    def _apply_window(self) -> Any:
        gradients, _ = self.accumulator.reduce()
        gradients = [gradient / self.scale for gradient in gradients]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

        def apply() -> Any:
            self.strategy.run(self._apply, args=(gradients,))
            return True

        applied = tf.cond(finite, apply, lambda: False)
        self.scale.assign(tf.where(finite, self.scale, self.scale / 2.0))
        return applied

    def _apply(self, gradients: Any) -> None:
        tmg.apply_reduced_gradients(self.optimizer, gradients, self.model.trainable_variables)


def unions(batches: list[Any]) -> list[Any]:
    windows = [batches[i : i + WINDOW] for i in range(0, len(batches), WINDOW)]
    return [tuple(np.concatenate(parts) for parts in zip(*w, strict=True)) for w in windows]


def on_one_device(build: Callable[[], Training], batches: list[Any]) -> list[list[np.ndarray]]:
    keras.utils.set_random_seed(0)
    truth = build()
    loop = OneDevice(truth)
    loop.build(batches[0])
    after = []
    for batch in batches:
        loop.step(tuple(tf.constant(part) for part in batch))
        after.append([variable.numpy() for variable in truth.variables().values()])
    return after


def assert_same_windows(windows: Windows, ours: list[Any], truth: list[Any]) -> None:
    for window, (actual, expected) in enumerate(zip(ours, truth, strict=True)):
        named = zip(windows.ours.variables(), actual, expected, strict=True)
        for name, value, right in named:
            what = f"{name} after window {window}"
            np.testing.assert_allclose(value, right, rtol=EXACT, atol=EXACT, err_msg=what)


@pytest.mark.parametrize(
    ("replicas", "reduction"),
    [(1, "sum_over_batch_size"), (3, "mean_with_sample_weight")],
)
def test_a_window_of_batches_is_one_batch_of_all_their_rows(replicas: int, reduction: str) -> None:
    """Steps, schedule, averages with their overwriting, constraints, decay and clipping too."""
    build = functools.partial(training, reduction)
    windows = Windows(replicas, build)
    ours = windows.train(BATCHES)
    assert_same_windows(windows, ours, on_one_device(build, unions(BATCHES)))
    assert int(windows.optimizer.iterations.numpy()) == 3, "the short window is a step of its own"
    assert np.abs(ours[2][0] - ours[1][0]).max() > 1e-3, "and it moves the weights"


def with_overflow(batches: list[Any], batch: int, row: int) -> list[Any]:
    x, y, weight = batches[batch]
    weight = weight.copy()
    weight[row] = np.inf
    return [*batches[:batch], (x, y, weight), *batches[batch + 1 :]]


def test_an_overflow_in_any_batch_drops_its_window_and_no_other() -> None:
    first, _, last = unions(BATCHES)
    windows = Windows(2, training, scale=1024.0)
    expected, second = on_one_device(training, [first, last])
    for batch, row in ((3, 0), (4, -1), (5, 0), (5, -1)):  # On the first replica or the last.
        ours = windows.train(with_overflow(BATCHES, batch, row))
        assert windows.skipped == [False, True, False], (batch, row)
        assert_same_windows(windows, ours, [expected, expected, second])
        assert windows.accumulator.count == 0
        assert float(windows.scale) == 512.0


def test_with_reduction_sum_the_weights_of_a_window_add_up_to_one() -> None:
    """``reduction="sum"`` divides by nothing: a window is the sum of the sums of its batches."""
    build = functools.partial(training, "sum")
    windows = Windows(3, build)
    each = 1.0 / (3 * WINDOW)
    window = BATCHES[:WINDOW]

    def add(x: Any, y: Any, weight: Any, row_weight: Any) -> None:
        with tf.GradientTape() as tape:
            y_pred = windows.model(x, training=True)
            pair = tmg.loss_sum(windows.ours.loss, y, y_pred, weight, row_weight=row_weight)
        gradients = tape.gradient(pair.sum, windows.model.trainable_variables)
        windows.accumulator.add(gradients, each)

    windows._add = add
    ours = windows.train(window)
    assert_same_windows(windows, ours, on_one_device(build, unions(window)))
