"""Gradients sent as bfloat16: off by no more than is promised, and only where asked."""

from __future__ import annotations

from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import Replicated, cut, difference, strategy_of

import tfmultigpu as tmg
from tfmultigpu.strategies.collectives import forcing_addition, sum_over_replicas

_random = np.random.default_rng(5)
BATCHES = cut((_random.normal(size=(40, 6)).astype("float32"), _random.integers(0, 4, 40)), [33, 2])
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("way", ["in memory", "collective"])
def test_the_bound_on_sums(way: Literal["in memory", "collective"]) -> None:
    replicas = 4
    parts = _random.normal(size=(replicas, 3, 200)).astype("float32")
    strategy = strategy_of(replicas)

    @tf.function(autograph=False)
    def add() -> Any:
        values = [
            [tf.constant(part[0]), tf.constant(part[1], tf.float64), tf.constant(part[2])]
            for part in parts
        ]
        return sum_over_replicas(strategy, values, tf.bfloat16)

    collective = way == "collective"
    with forcing_addition(way), strategy.scope() if collective else tf.name_scope("outside"):
        results = add()
    assert len(results) == (replicas if collective else 1)
    for rounded, double, last in results:
        dtypes = [one.dtype for one in (rounded, double, last)]
        assert dtypes == [tf.float32, tf.float64, tf.float32]
        off = np.abs(rounded.numpy() - parts[:, 0].sum(axis=0))
        assert np.all(off <= replicas / 256 * np.abs(parts[:, 0]).sum(axis=0))
        assert off.max() > 1e-3  # It was rounded.
        np.testing.assert_allclose(double, parts[:, 1].astype("float64").sum(axis=0), rtol=1e-12)
        np.testing.assert_allclose(last, parts[:, 2].sum(axis=0), rtol=1e-5, atol=1e-6)


# One step of SGD with a rate of 1 is the gradient. Fails if owners round otherwise than replicas,
# or if anything but gradients is rounded.
def test_steps_round_gradients_and_nothing_else() -> None:
    def train(**options: Any) -> tuple[list[np.ndarray], dict[str, float]]:
        def build() -> keras.Model:
            return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])

        run = Replicated(3, build, lambda: keras.optimizers.SGD(1.0), LOSS, verify=False, **options)
        result = run.train(BATCHES)
        return result.weights, result.logs[0]

    exact, exact_logs = train()
    rounded, logs = train(features=[tmg.steps.NarrowMessages()])
    owned, _ = train(features=[tmg.steps.NarrowMessages()], shard_update=True)
    assert 1e-5 < difference(exact, rounded) < 3 / 256 * 2
    assert difference(rounded, owned) <= 1e-6
    for name in ("loss", "weight"):
        assert logs[name] == pytest.approx(exact_logs[name], rel=1e-6)
