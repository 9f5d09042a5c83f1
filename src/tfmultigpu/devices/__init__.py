"""Device names, discovery and settings."""

from tfmultigpu.devices.configure import (
    Device,
    enable_memory_growth,
    limit_memory,
    list_devices,
    list_logical_devices,
    logical_to_physical,
    restrict_devices,
    split_device,
    visible_devices,
)

__all__ = [
    "Device",
    "enable_memory_growth",
    "limit_memory",
    "list_devices",
    "list_logical_devices",
    "logical_to_physical",
    "restrict_devices",
    "split_device",
    "visible_devices",
]
