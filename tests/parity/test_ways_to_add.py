"""Both ways to add over replicas, in memory and by collectives, in one process."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import tensorflow as tf
from one_device import Replicated, cut, hold, strategy_of
from problems import MIXED, W, X, Y, crossentropy, mlp, sgd

from tfmultigpu.strategies.collectives import forcing_addition, replicas_share_memory

WAYS = ["in memory", "collective"]
Way = Literal["in memory", "collective"]
BATCHES = cut((X, Y, W), MIXED)
LOSS = crossentropy("mean_with_sample_weight")


def build() -> Any:
    return mlp(l2=0.05)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    with forcing_addition(in_memory=request.param == "in memory"):
        yield request.param


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (4, {"loss_scale": 1024.0, "micro_batches": 2}),
        (3, {"shard_update": True, "micro_batches": 3}),
    ],
    ids=["scaled", "sharded"],
)
def test_as_one_device(way: Way, replicas: int, options: dict[str, Any]) -> None:
    hold(replicas, build, sgd, LOSS, BATCHES, clip_norm=0.3, **options)


def test_each_way_is_really_taken(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often replicas add, they meet once; on GPUs that is one all-reduce."""
    calls: list[int] = []
    original = tf.distribute.ReplicaContext.all_reduce

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counting)
    strategy = strategy_of(2)
    assert replicas_share_memory(strategy) == (way == "in memory")
    run = Replicated(strategy, build, sgd, LOSS, verify=False, micro_batches=4)
    run.step((X[:20], Y[:20], W[:20]))
    assert len(calls) == (2 if way == "collective" else 0)  # Once on each replica.
