"""What goes wrong in training and needs a process to itself, raised for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from law.processes import WorkerRaised, pool

import tfmultigpu as tmg
from tfmultigpu.steps.failures import explaining_failures


def two_rings_over_different_devices() -> None:
    tmg.testing.virtual_devices(3)

    def adding_on(*devices: str) -> Callable[[], None]:
        strategy = tf.distribute.MirroredStrategy(devices)

        def add() -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([3]))

        def run() -> None:
            with explaining_failures(strategy):
                strategy.run(add)

        return run

    first, second = adding_on("CPU:0", "CPU:1"), adding_on("CPU:0", "CPU:1", "CPU:2")
    first()
    with pytest.raises(tmg.errors.StrategyUnavailableError):
        second()
    first()


@pytest.mark.slow
def test_two_strategies_that_abort_each_other_are_told() -> None:
    worker = pool().start()
    with pytest.raises(WorkerRaised) as raised:
        worker.call(two_rings_over_different_devices)
    assert raised.value.kinds[0] == "StrategyUnavailableError", raised.value.text
    says = "aborts both, and all others that use them, until the process restarts"
    assert says in raised.value.text
