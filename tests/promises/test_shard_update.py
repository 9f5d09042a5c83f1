"""``shard_update=True``: each optimizer state once instead of N times, with the same result."""

from __future__ import annotations

import functools
from typing import Any

import keras
import pytest
import tensorflow as tf
from law.model import Training, regression, small
from law.pair import Pair

optimizers = keras.optimizers
EMA = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
SIZES = (7, 1, 2, 5)


def trained_by(make: Any, clip_norm: float | None = None) -> Training:
    return small(make(), clip_norm=clip_norm)


def pair_of(replicas: int, make: Any, clip_norm: float | None = None) -> Pair:
    build = functools.partial(trained_by, make, clip_norm)
    return Pair(build, regression([1])[0], replicas, shard_update=True)


# Fails if an owner misses its update or another replica repeats it, the copies differ, a slot is
# that of another variable, clipping sees the variables of one owner, or iterations count owners.
CASES: dict[str, tuple[int, Any, float | None]] = {
    "SGD with momentum, clip_norm, EMA": (
        3,
        lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **EMA),
        0.5,
    ),
    "Adam, global_clipnorm": (
        2,
        lambda: optimizers.Adam(0.05, epsilon=0.1, global_clipnorm=0.5),
        None,
    ),
    "AdamW, EMA": (3, lambda: optimizers.AdamW(0.05, epsilon=0.1, weight_decay=0.1, **EMA), None),
    "RMSprop, clipnorm": (2, lambda: optimizers.RMSprop(0.05, momentum=0.9, clipnorm=0.2), None),
    "Lion, schedule": (
        3,
        lambda: optimizers.Lion(optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
        0.5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_owners_update_as_one_device_does(case: str) -> None:
    replicas, make, clip_norm = CASES[case]
    pair = pair_of(replicas, make, clip_norm)
    pair.hold(regression(SIZES))
    assert int(pair.ours.optimizer.iterations.numpy()) == len(SIZES)


# Fails if the state of an owner is created on the other replicas too, as it is without sharding.
def test_each_state_exists_once() -> None:
    pair = pair_of(3, lambda: optimizers.Adam(0.05))
    next_shards = next(pair.shards(regression([4])))
    pair.step(next_shards)
    local = pair.strategy.experimental_local_results
    slots = [v for v in pair.ours.optimizer.variables if v.path.endswith(("momentum", "velocity"))]
    assert len(slots) == 2 * len(pair.ours.model.trainable_variables)
    assert [len(local(slot.value)) for slot in slots] == [1] * len(slots)
    assert len({tf.convert_to_tensor(slot.value).device for slot in slots}) > 1


# Fails if what an optimizer keeps of all variables together is not updated once.
@pytest.mark.parametrize("optimizer", ["Nadam", "Adafactor"])
def test_any_optimizer_of_keras(optimizer: str) -> None:
    pair_of(2, lambda: getattr(optimizers, optimizer)(0.05)).hold(regression(SIZES))
