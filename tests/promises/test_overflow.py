"""An inf or NaN on one replica under loss scaling: the step is skipped on all of them."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from law.model import Batch, Training, regression, small
from law.pair import LOGS, Pair, strategy_of

import tfmultigpu as tmg

SIZES = (7, 5, 2, 1)
GROWTH = 2  # Good steps after which the scale of the wrapped optimizer doubles.
SCALE = 2.0**15  # Where Keras' LossScaleOptimizer begins.


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01)


def wrapped() -> Any:
    return keras.optimizers.LossScaleOptimizer(sgd(), dynamic_growth_steps=GROWTH)


def averaged() -> Any:
    return keras.optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    )


# Fails if a replica decides by its own gradient, the update of a skipped step runs anywhere or is
# counted, the scale stays or falls once for each replica, or zeros replace what is not finite.
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "dynamic, N=3": (3, averaged, {"loss_scale": "dynamic"}),
    "dynamic, N=2, shard_update": (2, sgd, {"loss_scale": "dynamic", "shard_update": True}),
    "a number, N=2": (2, sgd, {"loss_scale": 1024.0, "clip_norm": 0.5}),
    "LossScaleOptimizer, N=3": (3, wrapped, {}),
}


class Scaled(Pair):
    """A pair whose step scales the loss, and whose truth is the plain optimizer without a scale."""

    def __init__(self, case: str) -> None:
        replicas, make, options = CASES[case]
        options = dict(options)
        clip_norm = options.pop("clip_norm", None)
        makers = iter((averaged if make is averaged else sgd, make))  # The truth is built first.

        def build() -> Training:
            return small(next(makers)(), clip_norm=clip_norm)

        super().__init__(build, regression([1])[0], replicas, **options)
        self.dynamic = options.get("loss_scale", "dynamic") == "dynamic"
        self.scale = SCALE if self.dynamic else options["loss_scale"]
        self.growth, self.good = GROWTH if make is wrapped else 2000, 0

    def inner(self) -> Any:
        return getattr(self.ours.optimizer, "inner_optimizer", self.ours.optimizer)

    def trained(self) -> list[np.ndarray]:
        """Every copy of every weight, slot and counter, but not of the scale."""
        variables = [*self.ours.model.variables, *self.inner().variables]
        local = self.strategy.experimental_local_results
        return [copy.numpy() for v in variables for copy in local(v.value)]

    def restart(self) -> None:
        self.truth.assign(self.start)
        both = (self.ours.model, self.truth.model), (self.inner(), self.truth.optimizer)
        for ours, truth in both:
            for variable, value in zip(ours.variables, truth.variables, strict=True):
                variable.assign(value)

    def train(self, batches: list[Batch], skipped: list[bool]) -> None:
        """Holds each step to one device, or to what was there before if it is to be skipped."""
        for batch, shards, skip in zip(batches, self.shards(batches), skipped, strict=True):
            before = self.trained()
            logs = {name: float(value) for name, value in self.step(shards).items()}
            assert logs["skipped"] == skip
            assert logs["loss_scale"] == self.scale
            if skip:
                np.testing.assert_equal(before, self.trained())
                self.scale = max(self.scale / 2, 1.0) if self.dynamic else self.scale
                self.good = 0
                continue
            self.good += 1
            if self.good == self.growth:
                self.scale, self.good = self.scale * 2, 0
            expected = self.plain.step(batch)
            np.testing.assert_allclose(logs["loss"], expected["loss"], **LOGS)
            np.testing.assert_allclose(logs["gradient_norm"], expected["gradient_norm"], **LOGS)
            for ours, truth in zip(
                [*self.ours.model.variables, *self.inner().variables],
                [*self.truth.model.variables, *self.truth.optimizer.variables],
                strict=True,
            ):
                np.testing.assert_allclose(ours, truth, rtol=1e-7, atol=1e-9, err_msg=ours.path)


scaled = functools.cache(Scaled)


def spoilt(batches: list[Batch], number: int, row: int, value: float) -> list[Batch]:
    """Returns the batches, with a value in one row of the labels of one of them."""
    copies = [(x.copy(), y.copy()) for x, y in batches]
    y = copies[number][1]
    y[row % len(y), 1] = value
    return copies


@pytest.mark.parametrize("case", CASES)
def test_one_row_that_overflows_skips_the_step_on_all(case: str) -> None:
    @settings(max_examples=10)
    @given(
        number=st.integers(0, len(SIZES) - 1),
        row=st.integers(0, max(SIZES) - 1),
        value=st.sampled_from([np.inf, -np.inf, np.nan]),
    )
    def hold(number: int, row: int, value: float) -> None:
        pair = scaled(case)
        pair.restart()
        skipped = [i == number for i in range(len(SIZES))]
        pair.train(spoilt(regression(SIZES), number, row, value), skipped)

    good = regression(SIZES)
    scaled(case).train(good, [False] * len(good))  # Verified, and everything is built.
    hold()
    counted = scaled(case).inner().iterations
    assert int(counted.numpy()) == len(SIZES) - 1


# Fails if what is not finite is hidden without a loss scale: kept out of weights or logs.
def test_without_loss_scaling_the_answer_is_that_of_one_device_and_shows() -> None:
    pair = Pair(small, regression([1])[0], 2)
    batches = spoilt(regression(SIZES), 1, 3, np.inf)
    expected = pair.plain.train(batches[:2])
    first, second = (pair.step(shards) for shards in pair.shards(batches[:2]))
    assert np.isfinite(float(first["gradient_norm"]))
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(second[name], expected[1][name])
        assert not np.isfinite(float(second[name])), name
    assert float(second["skipped"]) == 0
    pair.assert_same()
    assert not all(np.isfinite(value).all() for value in pair.ours.values())


# Fails if a gradient of float16 that overflows by the scale alone is applied, or if the scale does
# not fall until it fits, or if the step that fits is not unscaled.
def test_the_scale_falls_until_gradients_of_float16_fit() -> None:
    strategy = strategy_of(3)
    with strategy.scope():
        layer = keras.layers.Dense(2, dtype="mixed_float16")
        model = keras.Sequential([keras.Input((4,)), layer])
        optimizer = keras.optimizers.SGD(2.0**-7)
    step = tmg.make_train_step(
        model, optimizer, "mse", strategy, loss_scale="dynamic", verify=False
    )
    ((x, y),) = regression([5])
    y = 300.0 * y
    before = model.get_weights()
    slope = 2 * (x @ before[0] + before[1] - y) / y.size
    data = tmg.distribute_dataset(tf.data.Dataset.from_tensors((x, y)).repeat(20), strategy)
    skipped = 0
    for shards in data:
        logs = step(shards)
        assert float(logs["loss_scale"]) == SCALE / 2**skipped
        if not float(logs["skipped"]):
            break
        skipped += 1
        np.testing.assert_equal(before, model.get_weights())
    assert skipped > 2
    assert int(optimizer.iterations.numpy()) == 1
    steps = [new - old for new, old in zip(model.get_weights(), before, strict=True)]
    for moved, gradient in zip(steps, (x.T @ slope, slope.sum(0)), strict=True):
        # What float16 keeps of numbers is 11 bits.
        np.testing.assert_allclose(moved, -(2.0**-7) * gradient, rtol=1e-2, atol=1e-3)
