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


def training(reduction: str = "sum_over_batch_size", clip_norm: float | None = None) -> Training:
    constraint = keras.constraints.MaxNorm(0.8)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", kernel_constraint=constraint),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    return Training(model, everything_that_counts(), loss, clip_norm=clip_norm)


CASES = [
    Case(
        "what counts steps counts windows: sum in 2 micro-batches",
        functools.partial(training, "sum", clip_norm=0.3),
        BATCHES,
        options={"micro_batches": 2},
    )
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_micro_batches_are_one_window(case: Case) -> None:
    case.hold()


# Across batches -----------------------------------------------------------------------------------


class Windows:
    """The loop of the documentation: adds batches, applies once for each window."""

    def __init__(self, replicas: int, build: Callable[[], Training]) -> None:
        self.strategy = strategy_of(replicas)
        keras.utils.set_random_seed(0)
        with self.strategy.scope():
            self.ours = build()
            self.model, self.optimizer = self.ours.model, self.ours.optimizer
            self.optimizer.build(self.model.trainable_variables)
            self.accumulator = tmg.GradientAccumulator(self.model.trainable_variables)
        self.add_next = tf.function(self._add_next)
        self.apply_window = tf.function(self._apply_window)

    def train(self, batches: list[Any]) -> list[list[np.ndarray]]:
        """Returns all variables after each window."""
        spec = tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in batches[0])
        dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
        iterator = iter(tmg.distribute_dataset(dataset, self.strategy))
        after = []
        for i in range(len(batches)):
            self.add_next(iterator)
            if (i + 1) % WINDOW == 0 or i + 1 == len(batches):
                self.apply_window()
                after.append([variable.numpy() for variable in self.ours.variables().values()])
        return after

    def _add_next(self, iterator: Any) -> None:
        batch = next(iterator)
        self.strategy.run(self._add, args=(*batch, tmg.data.row_weight(batch, self.strategy)))

    def _add(self, x: Any, y: Any, weight: Any, row_weight: Any) -> None:
        with tf.GradientTape() as tape:
            y_pred = self.model(x, training=True)
            pair = tmg.loss_sum(self.ours.loss, y, y_pred, weight, row_weight=row_weight)
        gradients = tape.gradient(pair.sum, self.model.trainable_variables)
        self.accumulator.add(gradients, pair.weight)

    def _apply_window(self) -> None:
        gradients, _ = self.accumulator.reduce()
        self.strategy.run(self._apply, args=(gradients,))

    def _apply(self, gradients: Any) -> None:
        tmg.apply_reduced_gradients(self.optimizer, gradients, self.model.trainable_variables)


def on_one_device(build: Callable[[], Training], batches: list[Any]) -> list[list[np.ndarray]]:
    """Trains on each window at once."""
    keras.utils.set_random_seed(0)
    truth = build()
    loop = OneDevice(truth)
    loop.build(batches[0])
    after = []
    for i in range(0, len(batches), WINDOW):
        parts = zip(*batches[i : i + WINDOW], strict=True)
        loop.step(tuple(tf.constant(np.concatenate(part)) for part in parts))
        after.append([variable.numpy() for variable in truth.variables().values()])
    return after


@pytest.mark.parametrize(("replicas", "reduction"), [(3, "sum_over_batch_size")])
def test_a_window_of_batches_is_one_batch_of_all_their_rows(replicas: int, reduction: str) -> None:
    """Steps, schedule, averages with their overwriting, constraints, decay and clipping too."""
    build = functools.partial(training, reduction)
    windows = Windows(replicas, build)
    ours = windows.train(BATCHES)
    for window, (found, expected) in enumerate(
        zip(ours, on_one_device(build, BATCHES), strict=True)
    ):
        for name, value, right in zip(windows.ours.variables(), found, expected, strict=True):
            what = f"{name} after window {window}"
            np.testing.assert_allclose(value, right, rtol=EXACT, atol=EXACT, err_msg=what)
    assert int(windows.optimizer.iterations.numpy()) == 3, "the short window is a step of its own"
    assert np.abs(ours[2][0] - ours[1][0]).max() > 1e-3, "and it moves the weights"
