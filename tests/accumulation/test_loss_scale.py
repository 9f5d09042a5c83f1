"""Low precision: one verdict about the global gradient, the same on every replica.

Overflows of wrapped optimizers are in tests/promises/test_overflow.py.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from one_device import Replicated

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


# Fails if gradients are divided by the rows after they were added, not before they were rounded.
def test_large_batches_do_not_overflow_float16() -> None:
    x, y = np.tile(X, (86, 1))[:4096], np.tile(Y, 86)[:4096]
    sgd = lambda: keras.optimizers.SGD(0.05)  # noqa: E731
    run = Replicated(2, lambda: mlp("mixed_float16"), sgd, LOSS, loss_scale=2.0**15, verify=False)
    assert [log["skipped"] for log in run.train([(x, y)] * 3).logs] == [0, 0, 0]


def test_a_dynamic_scale_halves_doubles_and_stays_in_bounds() -> None:
    def dynamic(scale: float, good_steps: int = 0) -> LossScale:
        own = LossScale(scale, growth_steps=3)
        own.good_steps.assign(good_steps)
        return own

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
