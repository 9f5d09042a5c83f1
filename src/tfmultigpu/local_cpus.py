"""Whether all that runs a step are CPUs of this process."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["all_on_local_cpus"]


def all_on_local_cpus(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether every replica is a CPU of this process, which shares its memory.

    Nothing can then run out of memory alone, and a tensor of one replica is at hand for all. One
    replica without a device of its own runs on the best that is there, so none but CPUs may be.
    """
    if strategy.num_replicas_in_sync == 1:
        kinds = {device.device_type for device in tf.config.list_logical_devices()}
        return kinds == {"CPU"}
    devices = strategy.extended.worker_devices
    return len(devices) == strategy.num_replicas_in_sync and all(
        "CPU" in device.upper() for device in devices
    )
