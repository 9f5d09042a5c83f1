"""Devices: what the machine has, without starting it; memory growth, limits and splits."""

from tfmultigpu.devices.configure import enable_memory_growth, limit_memory, split_device
from tfmultigpu.devices.discovery import (
    Device,
    list_devices,
    list_logical_devices,
    logical_to_physical,
)

__all__ = [
    "Device",
    "enable_memory_growth",
    "limit_memory",
    "list_devices",
    "list_logical_devices",
    "logical_to_physical",
    "split_device",
]
