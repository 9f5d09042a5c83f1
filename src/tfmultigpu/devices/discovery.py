"""Physical devices of this machine, and the logical devices that programs run on.

TensorFlow makes one *logical* device of each visible *physical* device, or several if it is split.
No function here starts a device, so device settings remain possible.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.devices.nvml import NvmlGpu, match_gpus, read_gpus

__all__ = [
    "Device",
    "describe_devices",
    "list_devices",
    "list_logical_devices",
    "logical_names",
    "logical_to_physical",
    "visible_devices",
]


@dataclass(frozen=True)
class Device:
    """A physical device.

    Attributes:
        name: `"GPU:0"`; the index counts the devices that CUDA shows to this process.
        kind: `"CPU"`, `"GPU"` or `"TPU"`.
        index: The number in `name`.
        description: The model, such as `"NVIDIA H200"`; empty if TensorFlow does not know it.
        compute_capability: Of a CUDA GPU, such as `(9, 0)`; otherwise `None`.
        memory_total: Bytes; `None` without the extra `nvml`, for all but NVIDIA GPUs, and if the
            driver's GPU cannot be identified with certainty.
        memory_free: Bytes that no process had taken when the device was listed; `None` as above.
    """

    name: str
    kind: str
    index: int
    description: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_free: int | None = None


def list_devices(kind: str | None = None) -> tuple[Device, ...]:
    """Lists the physical devices of this machine, including hidden and split ones; starts none.

    A split GPU is one entry here; `list_logical_devices` lists its parts. Memory needs the extra
    `nvml`.

    Args:
        kind: `"CPU"`, `"GPU"`, `"TPU"`, or `None` for all.

    Returns:
        The devices in TensorFlow's order.

    Example:
        >>> list_devices("CPU")[0].name
        'CPU:0'
    """
    config: Any = tf.config
    found = [
        (physical.name, config.experimental.get_device_details(physical))
        for physical in config.list_physical_devices()
    ]
    gpus = (
        read_gpus() if any(parse_device_name(name).startswith("GPU") for name, _ in found) else ()
    )
    return _of_kind(describe_devices(found, gpus, os.environ), kind)


def visible_devices(kind: str | None = None) -> tuple[Device, ...]:
    """Lists the physical devices that TensorFlow uses or will use; starts none.

    Leaves out devices that `restrict_devices` or `tf.config.set_visible_devices` hid.

    Args:
        kind: `"CPU"`, `"GPU"`, `"TPU"`, or `None` for all.

    Example:
        >>> visible_devices("CPU")[0].name
        'CPU:0'
    """
    config: Any = tf.config
    shown = {parse_device_name(physical.name) for physical in config.get_visible_devices()}
    return tuple(device for device in list_devices(kind) if device.name in shown)


def logical_to_physical() -> dict[str, str]:
    """Maps every logical device to its physical device; starts none.

    Two logical GPUs on one physical GPU share its memory and its time, and NCCL cannot join them.
    If `GPU:0` is hidden, the physical `GPU:1` is the logical `GPU:0`.

    Returns:
        Short names by short name, in order. TPU cores appear once TensorFlow lists them as
        physical devices.

    Example:
        >>> list(logical_to_physical().values())[0]
        'CPU:0'
    """
    config: Any = tf.config
    visible = set(config.get_visible_devices())
    parts = [
        (
            parse_device_name(device.name),
            len(config.get_logical_device_configuration(device) or (None,)),
        )
        for device in config.list_physical_devices()
        if device in visible
    ]
    return logical_names(parts)


def list_logical_devices(kind: str | None = None) -> tuple[str, ...]:
    """Lists the names that strategies and `tf.device` accept; starts no device.

    Args:
        kind: `"CPU"`, `"GPU"`, `"TPU"`, or `None` for all.

    Returns:
        Short names; indices count all devices of a kind and their parts.

    Example:
        >>> list_logical_devices("CPU")[0]
        'CPU:0'
    """
    names = logical_to_physical()
    return tuple(name for name in names if kind is None or name.startswith(f"{kind.upper()}:"))


def describe_devices(
    found: Iterable[tuple[str, Mapping[str, Any]]],
    gpus: Sequence[NvmlGpu],
    environment: Mapping[str, str],
) -> tuple[Device, ...]:
    """Combines what TensorFlow and the NVIDIA driver know; pure.

    Args:
        found: TensorFlow's name and details (`device_name`, `compute_capability`) of each device.
        gpus: The result of `nvml.read_gpus`.
        environment: The environment variables of this process.
    """
    named = [(parse_device_name(name), details) for name, details in found]
    models = {
        name: details.get("device_name") for name, details in named if name.startswith("GPU:")
    }
    memory = dict(zip(models, match_gpus(list(models.values()), gpus, environment), strict=True))
    devices = []
    for name, details in named:
        kind, index = name.split(":")
        gpu = memory.get(name)
        devices.append(
            Device(
                name=name,
                kind=kind,
                index=int(index),
                description=details.get("device_name") or "",
                compute_capability=details.get("compute_capability"),
                memory_total=gpu.memory_total if gpu else None,
                memory_free=gpu.memory_free if gpu else None,
            )
        )
    return tuple(devices)


def logical_names(parts: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Numbers logical devices as TensorFlow does, by kind over all physical devices; pure.

    Args:
        parts: Each visible physical device in order, with the number of its parts.

    Example:
        >>> logical_names([("CPU:0", 1), ("GPU:0", 2), ("GPU:2", 1)])
        {'CPU:0': 'CPU:0', 'GPU:0': 'GPU:0', 'GPU:1': 'GPU:0', 'GPU:2': 'GPU:2'}
    """
    count: dict[str, int] = {}
    names: dict[str, str] = {}
    for physical, number in parts:
        kind = physical.split(":")[0]
        for _ in range(number):
            names[f"{kind}:{count.get(kind, 0)}"] = physical
            count[kind] = count.get(kind, 0) + 1
    return names


def _of_kind(devices: Iterable[Device], kind: str | None) -> tuple[Device, ...]:
    if kind is not None and not isinstance(kind, str):
        raise TypeError(
            f"kind is 'GPU', 'CPU' or 'TPU', or None for all. Received: kind={kind!r}. Write "
            'tmg.list_devices("GPU").'
        )
    return tuple(device for device in devices if kind is None or device.kind == kind.upper())
