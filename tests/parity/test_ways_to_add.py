"""Both ways to add over replicas, in memory and by collectives, in one process."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import tensorflow as tf
from forced_addition import forcing_addition
from one_device import assert_same, cut, strategy_of
from small_problem import CASES, MIXED, replicated, truth

from tfmultigpu.strategies.collectives import (
    replicas_share_memory,
)

WAYS = ["in memory", "collective"]
Way = Literal["in memory", "collective"]
BATCHES = cut(CASES["all"][0], MIXED)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    with forcing_addition(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (4, {"loss_scale": 1024.0, "optimizer": "adam", "micro_batches": 2}),
        (3, {"shard_update": True, "micro_batches": 3}),
    ],
    ids=["scaled", "sharded"],
)
def test_as_one_device(way: Way, replicas: int, options: dict[str, Any]) -> None:
    run = replicated(replicas, "all", **options)
    expected = truth("all", tuple(MIXED), options.get("optimizer", "sgd"))
    # Adam divides by roots of tiny numbers in its first steps.
    assert_same(run.train(BATCHES), expected, weights=1e-5 if "optimizer" in options else 1e-6)


def test_each_way_is_really_taken(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = tf.distribute.ReplicaContext.all_reduce

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counting)
    strategy = strategy_of(2)
    assert replicas_share_memory(strategy) == (way == "in memory")
    run = replicated(2, "weights", verify=False)
    run.train(BATCHES[:1])
    assert bool(calls) == (way == "collective")


def test_by_itself_cpus_of_one_process_add_in_memory() -> None:
    assert replicas_share_memory(strategy_of(2))
    with forcing_addition("collective"):
        assert not replicas_share_memory(strategy_of(2))
    assert replicas_share_memory(strategy_of(2))
