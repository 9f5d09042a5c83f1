"""Replicas are added in the same order in each run, so that a resumed run has the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

from tfmultigpu.strategies.collectives import sum_on_devices

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
    assert found == {np.add.reduce(PARTS[:replicas])}
