"""What goes wrong in training and needs a process to itself, raised for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from law.processes import WorkerRaised, pool, unused_addresses

import tfmultigpu as tmg
from tfmultigpu.steps.failures import explaining_failures


def memory_growth_of_one_gpu() -> None:
    """Plants two GPUs where TensorFlow lists those of the driver; then as one of two workers."""
    from tensorflow.python.eager.context import pywrap_tfe

    names = [b"/physical_device:CPU:0", b"/physical_device:GPU:0", b"/physical_device:GPU:1"]
    pywrap_tfe.TF_ListPhysicalDevices = lambda: names
    pywrap_tfe.TF_GetDeviceDetails = lambda index: {"device_name": "H200"} if index else {}
    tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
    with pytest.raises(
        tmg.TfMultiGpuError, match=r"Write tmg\.enable_memory_growth\(\), for all GP"
    ):
        tmg.create_strategy()
    cluster = tmg.workers.Cluster(unused_addresses(2), 0)
    tmg.create_strategy(cluster=cluster, startup_timeout=1)


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
@pytest.mark.parametrize(
    ("event", "kind", "says"),
    [
        (memory_growth_of_one_gpu, "ClusterError", "Memory growth cannot differ between GPU"),
        (
            two_rings_over_different_devices,
            "StrategyUnavailableError",
            "it aborts both, and whatever else adds so, until the process restarts",
        ),
    ],
)
def test_each_event_is_an_error_that_says_what_to_do(event: Any, kind: str, says: str) -> None:
    worker = pool().start()
    with pytest.raises(WorkerRaised) as raised:
        worker.call(event)
    assert raised.value.kinds[0] == kind, raised.value.text
    assert says in raised.value.text
