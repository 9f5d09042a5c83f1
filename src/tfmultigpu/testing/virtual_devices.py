"""Several devices where there is one, for tests."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.devices.configure import split_device

__all__ = ["virtual_devices"]


def virtual_devices(count: int) -> tuple[str, ...]:
    """Makes the CPU into several logical devices, so that replicas can be tried on any machine.

    They are real devices to TensorFlow, with real copies and reductions between them; they only
    share their cores. Call it before anything starts TensorFlow's devices, for example in
    ``conftest.py``. Calling it again for as many or fewer changes nothing.

    Args:
        count: How many, at least 1.

    Returns:
        The names of ``count`` logical CPUs, ``("CPU:0", "CPU:1", ...)``.

    Raises:
        DevicesInitializedError: TensorFlow has started its devices with fewer.
        ValueError: ``count`` is less than 1.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.testing.virtual_devices(2)
        ('CPU:0', 'CPU:1')
        >>> tmg.create_strategy(devices=2).num_replicas_in_sync
        2
    """
    count = check_count("count", count)
    names = tuple(f"CPU:{index}" for index in range(count))
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or ()
    if len(configured) >= count:
        return names
    return split_device("CPU:0", parts=count)
