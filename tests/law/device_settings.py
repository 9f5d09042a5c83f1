"""Device settings in a process in which TensorFlow has not started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmultigpu as tmg


def refused(error: type[Exception], call: Callable[[], Any], said: str) -> None:
    """Holds that a call raises an error that says something."""
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


def hold() -> None:
    """Lists, plans, splits, starts, and tries to split again."""
    physical = tf.config.list_physical_devices("CPU")[0]
    assert tmg.list_devices("CPU")[0].name == "CPU:0"
    assert tmg.plan_strategy(devices=["CPU:0"]).devices == ("CPU:0",)
    assert str(tmg.doctor())
    # Two errors, and nothing has changed by them.
    refused(tmg.DeviceNotFoundError, lambda: tmg.split_device("CPU:1", parts=2), "CPU:1")
    refused(ValueError, lambda: tmg.split_device("CPU:0", parts=0), "0")
    assert tf.config.get_logical_device_configuration(physical) is None

    assert tmg.split_device("CPU:0", parts=2) == ("CPU:0", "CPU:1")
    names = tmg.split_device("CPU:0", parts=3)  # The last one before the start holds.
    assert names == ("CPU:0", "CPU:1", "CPU:2")
    assert len(tmg.list_devices("CPU")) == 1
    assert tmg.testing.virtual_devices(2) == names[:2]
    assert tmg.plan_strategy(devices=3).devices == names
    strategy = tmg.create_strategy(devices=3)  # This starts them.
    assert strategy.num_replicas_in_sync == 3
    total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None)
    assert float(total) == 6.0

    late = tmg.DevicesInitializedError
    refused(late, lambda: tmg.split_device("CPU:0", parts=4), "split_device")
    refused(late, lambda: tmg.testing.virtual_devices(4), "4")
    assert len(tf.config.list_logical_devices("CPU")) == 3
    assert tmg.split_device("CPU:0", parts=3) == names  # It is so already.
    if not tmg.list_devices("GPU"):
        assert tmg.enable_memory_growth() == ()
