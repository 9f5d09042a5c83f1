"""Low precision: one verdict about the global gradient, the same on every replica.

Overflows of wrapped optimizers are in tests/promises/test_overflow.py.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from one_device import ByHand, Replicated, assert_same, cut, difference

from tfmultigpu.accumulation.loss_scale import LossScale

_random = np.random.default_rng(17)
X = _random.normal(size=(48, 6)).astype("float32")
Y = _random.integers(0, 4, 48)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(policy: str = "float32") -> keras.Model:
    layers = [
        keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2", dtype=policy),
        keras.layers.Dense(4, dtype=policy),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    return keras.Sequential([keras.Input((6,), dtype="float32"), *layers])


def averaging() -> Any:
    average = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    return keras.optimizers.SGD(0.05, momentum=0.9, **average)


# One row whose gradient is infinite, in some batches, on one replica or another.
BATCHES = cut((X, Y, np.ones(48, "float32")), [12] * 8)
for number, replica in {1: 1, 4: 0, 5: 2}.items():
    BATCHES[number] = (*BATCHES[number][:2], BATCHES[number][2].copy())
    BATCHES[number][2][12 * replica // 3] = np.inf
GOOD = [batch for batch in BATCHES if np.isfinite(batch[2]).all()]


# Fails if a skipped step leaves a trace in weights, averages or counters, or if a scale that is not
# the optimizer's follows another rule than that of Keras.
def test_skipped_steps_leave_no_trace() -> None:
    expected = ByHand(mlp, averaging, LOSS).train(GOOD)
    run = Replicated(3, mlp, averaging, LOSS, loss_scale="dynamic")
    result = run.train(BATCHES)
    assert difference(result.weights, expected.weights) <= 1e-6
    assert result.iterations == len(GOOD) == 5
    assert [log["skipped"] for log in result.logs] == [0, 1, 0, 0, 1, 1, 0, 0]
    scales = [log["loss_scale"] / 2.0**15 for log in result.logs]
    assert scales == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.125, 0.125]


def test_a_fixed_scale_is_taken_out_before_clipping() -> None:
    sgd = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    expected = ByHand(mlp, sgd, LOSS, clip_norm=0.5).train(GOOD)
    run = Replicated(3, mlp, sgd, LOSS, loss_scale=1024.0, clip_norm=0.5, micro_batches=2)
    assert_same(run.train(GOOD), expected)
    result = run.train(BATCHES)
    assert difference(result.weights, expected.weights) <= 1e-6
    assert {log["loss_scale"] for log in result.logs} == {1024.0}


# Fails if gradients are divided by the rows after they were added, not before they were rounded.
def test_large_batches_do_not_overflow_float16() -> None:
    x, y = np.tile(X, (86, 1))[:4096], np.tile(Y, 86)[:4096]
    sgd = lambda: keras.optimizers.SGD(0.05)  # noqa: E731
    run = Replicated(2, lambda: mlp("mixed_float16"), sgd, LOSS, loss_scale=2.0**15, verify=False)
    assert [log["skipped"] for log in run.train([(x, y)] * 3).logs] == [0, 0, 0]


def test_a_dynamic_scale_halves_doubles_and_stays_in_bounds() -> None:
    def dynamic(scale: float, good_steps: int = 0) -> LossScale:
        return LossScale.of_variables(tf.Variable(scale), tf.Variable(good_steps), 3)

    scale, seen = dynamic(8.0), []
    for finite in (True, True, True, True, False, True, True, True):
        scale.update(tf.constant(finite))
        seen.append((float(scale.value()), int(scale.good_steps)))
    assert seen == [(8, 1), (8, 2), (16, 0), (16, 1), (8, 0), (8, 1), (8, 2), (16, 0)]
    low, high = dynamic(1.5), dynamic(3e38, good_steps=2)
    for expected in (1.0, 1.0):
        low.update(tf.constant(False))
        assert float(low.value()) == expected
    high.update(tf.constant(True))
    assert np.isfinite(float(high.value()))
    fixed = LossScale(64, growth_steps=None)
    fixed.update(tf.constant(False))
    assert float(fixed.value()) == 64.0
