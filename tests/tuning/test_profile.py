"""Where the time of a step goes: profiles of real steps, and what they advise."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import keras
import pytest
from one_device import step_on
from problems import networks, normal_rows

import tfmultigpu as tmg
from tfmultigpu.addons.tuning import StepProfile, profile_step

(X,) = normal_rows(12, 5)
Y = X.sum(1, keepdims=True)
PROFILE = StepProfile(10, 2, 64.0, 3.0, 0.001, 0.009, 0.001, 0.001)


def profiled(replicas: int) -> Any:
    build = networks(5, lambda: keras.layers.Dense(4), lambda: keras.layers.Dense(1))
    return step_on(replicas, build, lambda: keras.optimizers.Adam(0.01), "mse")


# Fails if a part is measured by another clock, or steps are trained that are not said.
def test_a_profile_of_two_replicas() -> None:
    step = profiled(2)
    data = tmg.distribute_dataset((X, Y), step.strategy, batch_size=5)
    begin = time.perf_counter()
    profile = profile_step(step, data, 6)
    assert (profile.steps, profile.replicas, profile.examples) == (6, 2, 4.0)
    assert 0 < profile.input < profile.seconds
    assert 0 < profile.all_reduce < profile.first < time.perf_counter() - begin
    assert 0 <= profile.host <= profile.call < profile.first  # The first one compiles.
    assert profile.throughput == profile.examples / profile.seconds
    assert "6 steps of 4 examples on 2 replica(s): " in str(profile)


def test_waiting_for_data_is_seen() -> None:
    def slowly() -> Any:
        for _ in range(3):
            time.sleep(0.2)
            yield X, Y

    profile = profile_step(profiled(1), tmg.distribute_dataset(slowly), 2)
    assert profile.input >= 0.1
    assert profile.advice.startswith("[input-bound]")
    assert profile.all_reduce == 0


def test_what_cannot_be_profiled_says_so() -> None:
    step = profiled(1)
    with pytest.raises(ValueError, match=r"at least 1\. .*: steps=0"):
        profile_step(step, [(X, Y)], 0)
    with pytest.raises(tmg.errors.DataError, match=r"Received: list_iterator\. Write iterator"):
        profile_step(step, [(X, Y)], 1)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, "compute-bound", "jit_compile=True"),
        ({"input": 0.01}, "input-bound", "num_parallel_calls"),
        ({"host": 0.005}, "host-bound", "step.run(iterator, 20)"),
        ({"all_reduce": 0.005}, "reduce-bound", "nvidia-smi topo"),
        ({"all_reduce": 0.005, "host": 0.006}, "host-bound", "steps_per_call=20"),
    ],
)
def test_the_largest_avoidable_part_is_to_be_changed_first(
    change: Any, code: str, says: str
) -> None:
    profile = dataclasses.replace(PROFILE, **change)
    assert profile.advice.startswith(f"[{code}]")
    assert says in profile.advice
    assert str(profile).endswith(profile.advice)
