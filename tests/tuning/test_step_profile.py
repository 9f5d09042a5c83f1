"""Where the time of a step goes: profiles of real steps, what they advise, and scaling."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
from each import each
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.addons.tuning import StepProfile, measure_scaling, profile_step
from tfmultigpu.addons.tuning.step_profile import advise
from tfmultigpu.addons.tuning.timed_step import timed
from tfmultigpu.strategies.collectives import forcing_addition

X = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
Y = X.sum(1, keepdims=True)
PROFILE = StepProfile(
    10, 64.0, 0.010, 0.0, 0.006, 0.001, 0.001, 0.001, (0.006, 0.0058), ("A", "B"), 2
)


def build(strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model, optimizer = keras.Sequential(layers), keras.optimizers.Adam(0.01)
    return tmg.make_train_step(model, optimizer, "mse", strategy, **options)


def state(step: Any) -> list[np.ndarray]:
    variables = [*step.model.variables, *step.optimizer.variables]
    return [variable.numpy() for variable in variables]


# The clock --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"loss_scale": "dynamic", "clip_norm": 0.5}, "collective"),
        ({"shard_update": True, "micro_batches": 2}, "in memory"),
    ],
    ids=["scaled", "sharded"],
)
def test_a_timed_step_computes_the_same(
    options: Any, way: Literal["in memory", "collective"]
) -> None:
    strategy = strategy_of(2)
    plain, other = build(strategy, **options), build(strategy, **options)
    twin, timing = timed(other)
    for _ in range(2):
        with forcing_addition(way):
            expected = plain((X, Y))
            logs, times = twin((X, Y)), timing.times
        assert logs.keys() == expected.keys()
        for name, value in expected.items():
            assert float(logs[name]) == pytest.approx(float(value), abs=1e-6), name
        assert len(times.replicas) == 2
        assert times.begin <= min(times.replicas)
        assert max(times.replicas) <= times.reduced <= times.updated
    for one, another in zip(state(plain), state(other), strict=True):
        np.testing.assert_allclose(one, another, rtol=0, atol=1e-6)


class Slow(keras.layers.Layer):
    """Sleeps where a replica has many rows."""

    def call(self, inputs: Any) -> Any:
        def nap(x: np.ndarray) -> np.ndarray:
            time.sleep(0.2 if len(x) > 6 else 0.0)
            return x

        slept = tf.numpy_function(nap, [inputs], tf.float32, stateful=False)
        return inputs + tf.stop_gradient(tf.ensure_shape(slept, inputs.shape) * 0)


def test_the_slowest_replica_is_named() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        layers = [keras.Input((5,)), Slow(), keras.layers.Dense(1)]
        model, optimizer = keras.Sequential(layers), keras.optimizers.SGD(0.01)
    step = tmg.make_train_step(model, optimizer, "mse", strategy, verify=False)
    arrays = np.tile(X, (12, 1)), np.tile(Y, (12, 1))
    data = tmg.distribute_dataset(arrays, strategy, batch_size=12, shares=(3, 1))
    profile = profile_step(step, data, 3)
    assert (profile.steps, profile.rows, profile.slowest) == (3, 12.0, 0)
    assert profile.replicas[0] > max(0.2, profile.replicas[1])
    assert profile.compute >= profile.replicas[0]
    assert profile.advice.code == "slow-replica"
    assert "Replica 0 (CPU:0) takes" in str(profile)
    assert "tmg.plan_shares(batch_size" in str(profile)
    assert int(optimizer.iterations.numpy()) == 1 + 1 + 3 + 3


def test_waiting_for_data_is_seen() -> None:
    step = build(tf.distribute.get_strategy())

    class Slowly:
        def __iter__(self) -> Any:
            for _ in range(2):
                time.sleep(0.2)
                yield X, Y

    profile = profile_step(step, Slowly(), 3)
    assert profile.input >= 0.2
    assert profile.advice.code == "input-bound"
    assert "The devices wait " in profile.advice.what
    assert len(profile.replicas) == 1


def test_what_cannot_be_profiled_says_so() -> None:
    step = build(tf.distribute.get_strategy())
    with pytest.raises(TypeError, match=r"a train step\. Received: step=None\. Make it with"):
        profile_step(None, [(X, Y)])  # type: ignore[arg-type]
    for steps in (0, None, 1.5):
        with pytest.raises((TypeError, ValueError), match=rf"at least 1\. .*: steps={steps}"):
            profile_step(step, [(X, Y)], steps)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"data must yield batches\. Received: data=None"):
        profile_step(step, None)  # type: ignore[arg-type]
    assert int(step.optimizer.iterations) == 0
    with pytest.raises(tmg.errors.DataError, match="There is no batch to profile"):
        profile_step(step, [])


# Advice -----------------------------------------------------------------------------------------


@each(
    ("change", "code", "says"),
    [
        ({}, "compute-bound", "jit_compile=True"),
        ({"input": 0.01}, "input-bound", "num_parallel_calls"),
        ({"replicas": (0.004, 0.006)}, "slow-replica", "plan_shares"),
        ({"call": 0.01}, "call-bound", "step.run(iterator, 20)"),
        ({"reduce": 0.01}, "reduce-bound", "Larger global batches"),
        ({"update": 0.01}, "update-bound", "shard_update=True"),
        ({"update": 0.01, "replicas_in_all": 1}, "update-bound", "larger batches, or an optim"),
        ({"reduce": 0.01, "replicas_in_all": 1}, "compute-bound", "jit_compile=True"),
        ({"reduce": 0.02, "input": 0.01}, "reduce-bound", "Larger global batches"),
        # One replica of each worker here: there is nothing to compare it to, but a sum.
        ({"reduce": 0.01, "replicas": (0.006,), "devices": ("A",)}, "reduce-bound", "nccl"),
    ],
)
def test_the_largest_avoidable_part_is_to_be_changed_first(
    change: Any, code: str, says: str
) -> None:
    profile = dataclasses.replace(PROFILE, **change)
    assert advise(profile).code == code
    assert says in advise(profile).change
    assert str(profile).splitlines()[-4] == "change first:"


# Scaling ----------------------------------------------------------------------------------------


def test_scaling_is_a_row_for_each_number_of_replicas() -> None:
    def build_step(strategy: Any) -> Any:
        return build(strategy), tmg.distribute_dataset((X, Y), strategy, batch_size=6)

    one, two = measure_scaling(build_step, (1, 2), steps=3)
    assert (one.replicas, two.replicas) == (1, 2)
    assert one.efficiency == 1.0
    assert two.throughput == pytest.approx(two.profile.rows / two.profile.seconds)
    assert two.efficiency == pytest.approx(two.throughput / one.throughput / 2)
    assert two.profile.devices == ("CPU:0", "CPU:1")
    with pytest.raises(tmg.DeviceNotFoundError, match=r"Asked for 9"):
        measure_scaling(build_step, (9,))
    with pytest.raises(ValueError, match=r"replicas must be a whole number"):
        measure_scaling(build_step, (0,))
