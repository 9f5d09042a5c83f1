"""Replicas are added in the same order in each run, so that a resumed run has the same bits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import step_on, strategy_of
from problems import W, X, Y, crossentropy, mlp, sgd

from tfmultigpu.strategies.collectives import (
    forcing_addition,
    meetings_in_pairs,
    replicas_share_memory,
    sum_on_devices,
)

# Each order of these has another sum: beside the large ones the small ones are lost.
PARTS = [1e16, 1.0, -1e16, 3.0]


# Fails if the order follows the device of the sum, or what has run so far: which memory is free.
@pytest.mark.parametrize(("replicas", "owner"), [(3, 0), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
def test_the_bits_of_a_sum_are_those_of_the_order_of_replicas(replicas: int, owner: int) -> None:
    devices = strategy_of(replicas).extended.worker_devices
    found = set()
    for fresh in itertools.product((False, True), repeat=replicas):

        @tf.function(autograph=False)
        def add(*given: tf.Tensor, fresh: tuple[bool, ...] = fresh) -> tf.Tensor:
            parts = []
            for device, part, is_fresh in zip(devices, given, fresh, strict=True):
                with tf.device(device):
                    # What a function is given its caller keeps, and nothing writes to.
                    parts.append([part * 2.0 if is_fresh else tf.identity(part)])
            return sum_on_devices(parts, [devices[owner]])[0]

        given = [p / 2 if is_fresh else p for p, is_fresh in zip(PARTS, fresh, strict=False)]
        found.add(float(add(*(tf.constant([part], tf.float64) for part in given))[0]))
    first, second = np.add.reduce(PARTS[:2]), np.add.reduce(PARTS[2:replicas])
    assert found == {first + second}  # Neighbours first.


def tree(leaves: list[str]) -> str:
    """The order in which one process adds: neighbours first, an odd one passes up."""
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [f"({'+'.join(pair)})" if len(pair) > 1 else pair[0] for pair in pairs]
    return leaves[0]


# Fails if workers add in another tree, one is left out of a sum, or has not learned it.
@pytest.mark.parametrize("workers", range(1, 18))
def test_workers_add_in_the_tree_of_one_process(workers: int) -> None:
    leaves = [str(worker) for worker in range(workers)]
    sums, sent = list(leaves), 0
    for groups in meetings_in_pairs(workers):
        meeting = [worker for group in groups for worker in group]
        assert len(set(meeting)) == len(meeting), "a worker is at two places at one time"
        before = list(sums)
        for first, *others, last in groups:
            assert {before[other] for other in others} <= {before[first]}
            for worker in (first, *others, last):
                sums[worker] = f"({before[first]}+{before[last]})"
        sent += 1
    assert set(sums) == {tree(leaves)}
    assert sent == (workers - 1).bit_length()


# Fails if replicas meet more than once in a step, however often they add; on GPUs that is one
# all-reduce. What both ways give is in tests/cases/options.py.
@pytest.mark.parametrize("in_memory", [True, False])
def test_each_way_to_add_is_really_taken(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = tf.distribute.ReplicaContext.all_reduce

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counting)
    with forcing_addition(in_memory=in_memory):
        assert replicas_share_memory(strategy_of(2)) == in_memory
        step = step_on(2, mlp, sgd, crossentropy(), verify=False, micro_batches=4)
        step((X[:20], Y[:20], W[:20]))
    assert len(calls) == (0 if in_memory else 2)  # Once on each replica.
