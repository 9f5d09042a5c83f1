"""Replicas are added in the same order in each run, so that a resumed run has the same bits."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf
from one_device import strategy_of

from tfmultigpu.strategies.collectives import sum_on_devices

# Each order of these has another sum: of the large ones the small ones are lost.
PARTS = [1e16, 1.0, -1e16, 3.0]


# Fails if what has run so far, by which memory may be written to or not, changes the order.
@pytest.mark.parametrize("owner", range(4))
def test_the_bits_of_a_sum_do_not_depend_on_free_memory(owner: int) -> None:
    devices = strategy_of(4).extended.worker_devices
    found = set()
    for fresh in itertools.product((False, True), repeat=4):

        @tf.function(autograph=False)
        def add(*given: tf.Tensor, fresh: tuple[bool, ...] = fresh) -> tf.Tensor:
            parts = []
            for device, part, is_fresh in zip(devices, given, fresh, strict=True):
                with tf.device(device):
                    # What a function is given its caller keeps, and nothing writes to.
                    parts.append([part * 2.0 if is_fresh else tf.identity(part)])
            return sum_on_devices(parts, [devices[owner]])[0]

        halves = [p / 2 if is_fresh else p for p, is_fresh in zip(PARTS, fresh, strict=True)]
        found.add(float(add(*(tf.constant([half], tf.float64) for half in halves))[0]))
    assert len(found) == 1, found
