"""Physical devices of this machine, and the logical devices that programs run on.

TensorFlow makes one *logical* device of each visible *physical* device, or several if it is split.
No function here starts a device, so device settings remain possible.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import brief
from tfmultigpu.devices.gpu_memory import NvmlGpu, match_gpus, read_gpus
from tfmultigpu.devices.names import listed, parse_device_name

_config: Any = tf.config


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
        memory_free: Bytes free when the device was listed; `None` as above. It is not compared.
    """

    name: str
    kind: str
    index: int
    description: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_free: int | None = field(default=None, compare=False)


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
    details: dict[str, Mapping[str, Any]] = {}
    models: dict[str, str | None] = {}  # Of the GPUs.
    for physical in _config.list_physical_devices(_check_kind(kind)):
        name = parse_device_name(physical.name)
        details[name] = _config.experimental.get_device_details(physical)
        if name.startswith("GPU:"):
            models[name] = details[name].get("device_name")

    of_driver: tuple[NvmlGpu | None, ...] = ()
    if models:
        of_driver = match_gpus(tuple(models.values()), read_gpus(), os.environ)
    memory = dict(zip(models, of_driver, strict=True))

    devices = []
    for name, known in details.items():
        of_kind, index = name.split(":")
        model, capability = known.get("device_name") or "", known.get("compute_capability")
        gpu = memory.get(name) or NvmlGpu("", "")
        total, free = gpu.memory_total, gpu.memory_free
        devices.append(Device(name, of_kind, int(index), model, capability, total, free))
    return tuple(devices)


def logical_to_physical() -> dict[str, str]:
    """Maps every logical device to its physical device; starts none.

    TensorFlow numbers the parts of all visible devices of a kind in one row: if `GPU:0` is hidden,
    the physical `GPU:1` is the logical `GPU:0`. Hidden devices are left out. TPU cores appear once
    TensorFlow lists them.

    Returns:
        The name of the physical device for the name of each logical one.

    Example:
        >>> list(logical_to_physical().values())[0]
        'CPU:0'
    """
    visible = set(_config.get_visible_devices())
    names: dict[str, str] = {}
    count: Counter[str] = Counter()
    for device in _config.list_physical_devices():
        if device not in visible:
            continue
        physical = parse_device_name(device.name)
        kind = physical.split(":")[0]
        for _ in _config.get_logical_device_configuration(device) or (None,):
            names[f"{kind}:{count[kind]}"] = physical
            count[kind] += 1
    return names


def known_memory(name: str) -> float | None:
    """Returns the bytes of a logical device: its limit, or the memory that the driver tells."""
    owners = logical_to_physical()
    physical = owners.get(name, name)
    devices = {parse_device_name(one.name): one for one in _config.list_physical_devices()}
    limits = _config.get_logical_device_configuration(devices[physical]) or ()
    parts = [part for part, owner in owners.items() if owner == physical]
    if len(limits) == len(parts) and limits[parts.index(name)].memory_limit:
        return float(limits[parts.index(name)].memory_limit) * 1024**2  # It is in MiB.
    total = next((one.memory_total for one in list_devices() if one.name == physical), None)
    return None if total is None or len(parts) > 1 else float(total)


def list_logical_devices(kind: str | None = None) -> tuple[str, ...]:
    """Lists the names that strategies and `tf.device` accept; starts no device.

    Args:
        kind: `"CPU"`, `"GPU"`, `"TPU"`, or `None` for all.

    Returns:
        The names in TensorFlow's order.

    Example:
        >>> list_logical_devices("CPU")[0]
        'CPU:0'
    """
    kind = _check_kind(kind)
    return tuple(name for name in logical_to_physical() if kind in (None, name.split(":")[0]))


def _check_kind(kind: str | None) -> str | None:
    """Returns the kind in capitals; a misspelt one would look like a machine without it."""
    upper = kind
    if isinstance(kind, str):
        upper = kind.upper()
    if upper not in ("GPU", "CPU", "TPU", None):
        raise ValueError(
            f"kind is 'GPU', 'CPU' or 'TPU', or None for all. Received: kind={brief(kind)}. Write "
            'tmg.list_devices("GPU").'
        )
    return upper


# Why TensorFlow uses no more GPUs -----------------------------------------------------------------


_INSTALL = (
    "if there should be a GPU, nvidia-smi must list it, and TensorFlow needs its libraries: "
    "pip install 'tensorflow[and-cuda]'"
)
_NAME = "unset it before Python starts, or name GPUs that nvidia-smi -L lists"


def why_no_more_gpus() -> str | None:
    """Returns why TensorFlow uses no more GPUs, and what to do; `None` if it uses all."""
    untyped: Any = tf
    config, test = untyped.config, untyped.test
    physical = config.list_physical_devices("GPU")
    visible = config.get_visible_devices("GPU")
    hidden = [parse_device_name(gpu.name) for gpu in physical if gpu not in visible]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    variable = f"CUDA_VISIBLE_DEVICES={shown!r}"
    if hidden:
        return f"tf.config.set_visible_devices hides {listed(hidden)}; remove that call"
    if not physical and not test.is_built_with_gpu_support():
        too = ""
        if shown is not None:
            too = f", and {variable} is set ({_NAME})"
        return f"this TensorFlow is built without GPU support{too}; {_INSTALL}"
    if shown is None and physical:
        return None
    if shown is None:
        return f"TensorFlow finds none; {_INSTALL}"
    if shown.strip() in ("", "-1", "NoDevFiles"):
        return f"{variable} hides every GPU; {_NAME}"
    only = f"{variable} shows only GPUs that it names, up to the first that is missing; {_NAME}"
    if physical:
        return only
    return f"{only}; {_INSTALL}"
