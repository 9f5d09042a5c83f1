"""Virtual devices for tests."""

from __future__ import annotations

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.devices import split_device


def virtual_devices(count: int) -> tuple[str, ...]:
    """Splits the CPU into several logical devices, to test replicas on any machine.

    They share the cores of the CPU. Call it before anything starts TensorFlow's devices, for
    example in ``conftest.py``. A second call for as many or fewer changes nothing.

    Args:
        count: Number of devices, at least 1.

    Returns:
        The names of ``count`` logical CPUs, ``("CPU:0", "CPU:1", ...)``.

    Raises:
        DevicesInitializedError: TensorFlow started its devices with fewer.
        ValueError: ``count`` is less than 1.

    Example:
        >>> import tfmultigpu as tmg
        >>> tmg.testing.virtual_devices(2)
        ('CPU:0', 'CPU:1')
    """
    count = check_count("count", count)
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or ()
    if len(configured) >= count:
        return tuple(f"CPU:{index}" for index in range(count))
    return split_device("CPU:0", parts=count)
