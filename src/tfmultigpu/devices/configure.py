"""Device settings, which must be made before TensorFlow starts the devices.

Every setting is all or none: each function checks its arguments before it changes anything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.devices.discovery import (
    Device,
    list_devices,
    list_logical_devices,
    logical_to_physical,
    visible_devices,
)
from tfmultigpu.devices.names import listed, parse_device_name, resolve_devices
from tfmultigpu.errors import DeviceNotFoundError, DevicesInitializedError, TfMultiGpuError

__all__ = [
    "Device",
    "enable_memory_growth",
    "limit_memory",
    "list_devices",
    "list_logical_devices",
    "logical_to_physical",
    "parse_device_name",
    "resolve_devices",
    "restrict_devices",
    "split_device",
    "visible_devices",
]

_MIB = 1024**2
_FORCE_GROWTH = 'os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"'


def enable_memory_growth(devices: Sequence[str] | None = None) -> tuple[Device, ...]:
    """Lets GPUs allocate memory as they need it, instead of all of it at the start.

    TensorFlow needs the same setting on all visible GPUs. A second call changes nothing.

    Args:
        devices: All visible GPUs, by name; `None` takes them without naming them.

    Returns:
        The GPUs with memory growth; empty on a machine without GPUs.

    Raises:
        DeviceNotFoundError: A named GPU does not exist.
        DevicesInitializedError: TensorFlow started its devices without memory growth.
        TfMultiGpuError: A visible GPU is left out, or a device is split or limited.

    Example:
        >>> for gpu in enable_memory_growth():
        ...     print(gpu.name, "takes memory as it needs it")
    """
    call = f"enable_memory_growth({'' if devices is None else repr(devices)})"
    config: Any = tf.config
    gpus = {parse_device_name(gpu.name): gpu for gpu in config.get_visible_devices("GPU")}
    if devices is None and not gpus:
        return ()
    chosen = resolve_devices(devices, tuple(gpus))
    growing = {name for name, gpu in gpus.items() if config.experimental.get_memory_growth(gpu)}
    left_out = [name for name in gpus if name not in growing.union(chosen)]
    if left_out:
        raise TfMultiGpuError(
            f"{call} leaves out {listed(left_out)}. TensorFlow would fail at the first operation: "
            "memory growth cannot differ between GPUs. Call enable_memory_growth() for all, or "
            f"first hide the others: restrict_devices({list(chosen)})."
        )
    configured = _configured_devices(config)
    if configured and not _growth_forced():
        raise TfMultiGpuError(
            f"{call} came after {listed(configured)} was split or limited. TensorFlow then drops "
            "memory growth of every GPU without a message. Remove one of the two lines, or set "
            f"{_FORCE_GROWTH} before the first operation instead."
        )
    _turn_growth_on({name: gpu for name, gpu in gpus.items() if name not in growing}, call)
    return tuple(device for device in visible_devices("GPU") if device.name in gpus)


def limit_memory(limits: Mapping[str, int]) -> None:
    """Limits the memory that TensorFlow takes on each GPU.

    Args:
        limits: Bytes per physical GPU, rounded down to whole MiB. GPUs that are not named keep
            their limit.

    Raises:
        DeviceNotFoundError: A named device does not exist or is hidden.
        DevicesInitializedError: TensorFlow started its devices with other limits.
        TfMultiGpuError: The device is not a GPU, is split, or memory growth is on.
        ValueError: A limit is below 1 MiB, above the memory of the GPU, or given twice.

    Example:
        >>> limit_memory({gpu.name: 8 * 1024**3 for gpu in list_devices("GPU")})
    """
    if not isinstance(limits, Mapping):
        raise TypeError(
            "limit_memory takes the bytes of each GPU by its name. Received: "
            f'limits={limits!r}. Write tmg.limit_memory({{"GPU:0": 8 * 1024**3}}).'
        )
    call = f"limit_memory({dict(limits)!r})"
    names = [parse_device_name(name) for name in limits]
    if len(set(names)) < len(names):
        raise ValueError(f"{call} gives one device two limits. Name each device once.")
    config: Any = tf.config
    wanted = {}
    for name, limit in zip(names, limits.values(), strict=True):
        physical = _visible_device(config, name, call)
        if not name.startswith("GPU:"):
            raise TfMultiGpuError(
                f"{call}: TensorFlow can limit the memory of GPUs only, not of {name}. Leave "
                f"{name} out."
            )
        _check_bytes((limit,), name, call)
        parts = len(config.get_logical_device_configuration(physical) or ())
        if parts > 1:
            raise TfMultiGpuError(
                f"{call}: {name} is split into {parts} parts, and this limit would undo the split. "
                "Give the limit with the split: "
                f'split_device("{name}", parts={parts}, memory={limit // parts}).'
            )
        wanted[physical] = (limit,)
    _configure(config, wanted, call)


def split_device(
    device: str, parts: int, memory: int | Sequence[int] | None = None
) -> tuple[str, ...]:
    """Splits one CPU or GPU into several logical devices, to test replicas on one device.

    The parts share the device, so they are not faster than the whole. A second call before
    TensorFlow starts its devices replaces the first split.

    Args:
        device: A visible physical device, `"CPU:0"` or `"GPU:0"`.
        parts: Number of parts, at least 1.
        memory: Bytes of each part of a GPU: one number, or one per part. `None` divides nine
            tenths of the free memory, which needs the extra `nvml`. For a CPU `None`.

    Returns:
        The names of the parts. TensorFlow numbers the parts of `GPU:1` after those of `GPU:0`,
        so split in that order.

    Raises:
        DeviceNotFoundError: The device does not exist or is hidden.
        DevicesInitializedError: TensorFlow started its devices without this split.
        TfMultiGpuError: Memory growth is on, or TensorFlow cannot split the device this way.
        ValueError: `parts` or `memory` does not fit the other or the device.

    Example:
        >>> names = split_device("CPU:0", parts=4)  # doctest: +SKIP
        >>> strategy = tf.distribute.MirroredStrategy(names)  # doctest: +SKIP
    """
    call = f"split_device({device!r}, parts={parts!r}, memory={memory!r})"
    parts = check_count("parts", parts)
    config: Any = tf.config
    name = parse_device_name(device)
    physical = _visible_device(config, name, call)
    kind = name.split(":")[0]
    if kind == "CPU":
        if memory is not None:
            raise TfMultiGpuError(
                f"{call}: TensorFlow cannot limit the memory of CPU parts. Leave memory out."
            )
        sizes: tuple[int | None, ...] = (None,) * parts
    elif kind == "GPU":
        sizes = _part_sizes(name, parts, memory, call)
    else:
        raise TfMultiGpuError(f"{call}: TensorFlow can split CPUs and GPUs only.")
    _configure(config, {physical: sizes}, call)
    return tuple(part for part, owner in logical_to_physical().items() if owner == name)


def restrict_devices(devices: int | Sequence[str], kind: str = "GPU") -> tuple[Device, ...]:
    """Hides all other physical devices of a kind from TensorFlow.

    TensorFlow renumbers the logical devices: if only the physical `GPU:1` is visible, it is the
    logical `GPU:0`. TensorFlow keeps the order of the machine.

    Args:
        devices: Names from `list_devices`, or a count; `[]` hides all GPUs.
        kind: The kind to restrict; other kinds stay unchanged.

    Returns:
        The visible devices of this kind.

    Raises:
        DeviceNotFoundError: A named device does not exist.
        DevicesInitializedError: TensorFlow started its devices with others.
        TfMultiGpuError: No CPU would be left, and TensorFlow cannot start without one.
        ValueError: A device is named twice.

    Example:
        >>> restrict_devices([], kind="GPU")  # doctest: +SKIP
        ()
    """
    call = f"restrict_devices({devices!r}, kind={kind!r})"
    kind = kind.upper()
    config: Any = tf.config
    physical = {parse_device_name(one.name): one for one in config.list_physical_devices(kind)}
    nothing = not isinstance(devices, int) and len(devices) == 0
    if nothing and kind == "CPU":
        raise TfMultiGpuError(
            f"{call} leaves no CPU, and TensorFlow cannot start without one. Keep CPU:0."
        )
    chosen = () if nothing else resolve_devices(devices, tuple(physical))
    wanted = [one for name, one in physical.items() if name in chosen]
    if set(wanted) != set(config.get_visible_devices(kind)):
        try:
            config.set_visible_devices(wanted, kind)
        except RuntimeError as error:
            raise _devices_started_error(call) from error
    return visible_devices(kind)


def _visible_device(config: Any, name: str, call: str) -> Any:
    devices = {parse_device_name(one.name): one for one in config.get_visible_devices()}
    if name in devices:
        return devices[name]
    hidden = [parse_device_name(one.name) for one in config.list_physical_devices()]
    raise DeviceNotFoundError(
        (
            f"{call}: {name} is hidden from TensorFlow"
            if name in hidden
            else f"{call}: {name} does not exist"
        )
        + f". Asked for: {name}. Existing: {listed(tuple(devices))}. Name one of these"
        + (f", or first show {name} with restrict_devices." if name in hidden else ".")
    )


def _configured_devices(config: Any) -> tuple[str, ...]:
    """Returns the names of the devices that are split or limited."""
    return tuple(
        parse_device_name(physical.name)
        for physical in config.list_physical_devices()
        if config.get_logical_device_configuration(physical) is not None
    )


def _growth_forced() -> bool:
    return os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"


def _turn_growth_on(gpus: Mapping[str, Any], call: str) -> None:
    config: Any = tf.config
    experimental = config.experimental
    before = {name: experimental.get_memory_growth(gpu) for name, gpu in gpus.items()}
    done: list[str] = []
    try:
        for name, gpu in gpus.items():
            experimental.set_memory_growth(gpu, True)
            done.append(name)
    except (RuntimeError, ValueError) as error:
        for name in done:
            # TensorFlow refuses only if another thread has just started the devices.
            with contextlib.suppress(RuntimeError):
                experimental.set_memory_growth(gpus[name], before[name])
        if isinstance(error, RuntimeError):
            raise _devices_started_error(call) from error
        raise TfMultiGpuError(
            f"{call}: TensorFlow refused: {error}. Memory growth is unchanged."
        ) from error


def _part_sizes(
    name: str, parts: int, memory: int | Sequence[int] | None, call: str
) -> tuple[int, ...]:
    if memory is None:
        free = next((one.memory_free for one in list_devices("GPU") if one.name == name), None)
        if free is None:
            raise ValueError(
                f"{call}: the parts of a GPU need a memory limit, and the free memory of {name} is "
                "unknown. Give bytes, such as memory=4 * 1024**3, or install the extra that asks "
                'the driver: pip install "tfmultigpu[nvml]".'
            )
        memory = int(0.9 * free) // parts
    sizes = (memory,) * parts if isinstance(memory, int) else tuple(memory)
    if len(sizes) != parts:
        raise ValueError(
            f"{call} has {len(sizes)} memory limits for {parts} parts. Give one number for all, or "
            "one per part."
        )
    _check_bytes(sizes, name, call)
    return sizes


def _check_bytes(sizes: Sequence[int], name: str, call: str) -> None:
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < _MIB:
            raise ValueError(
                f"{call}: a memory limit is a whole number of bytes, at least 1 MiB; 8 GiB is "
                f"8 * 1024**3. Received: {size!r}"
            )
    total = next((one.memory_total for one in list_devices("GPU") if one.name == name), None)
    if total is not None and sum(sizes) > total:
        raise ValueError(
            f"{call} asks for {sum(sizes)} bytes in all, but {name} has {total}. Ask for less."
        )


def _configure(config: Any, wanted: Mapping[Any, tuple[int | None, ...]], call: str) -> None:
    """Splits or limits devices: memory limits in bytes, one per part, by physical device."""
    settings = {}
    for physical, sizes in wanted.items():
        setting = [
            config.LogicalDeviceConfiguration(memory_limit=size and size // _MIB) for size in sizes
        ]
        now = config.get_logical_device_configuration(physical)
        whole = now is None and sizes == (None,)
        if not whole and now != setting:
            settings[physical] = setting
    growing = [
        parse_device_name(gpu.name)
        for gpu in config.get_visible_devices("GPU")
        if config.experimental.get_memory_growth(gpu)
    ]
    if settings and growing and not _growth_forced():
        raise TfMultiGpuError(
            f"{call} came after memory growth was turned on for {listed(growing)}. TensorFlow "
            "drops memory growth of every GPU, without a message, if any device is split or "
            "limited, even the CPU. Remove enable_memory_growth(). If memory should still grow, "
            f"set {_FORCE_GROWTH} before the first operation."
        )
    # TensorFlow cannot undo a split, so the checks come first. The one error left, devices that
    # have started, comes from the first call, before anything has changed.
    for physical, setting in settings.items():
        try:
            config.set_logical_device_configuration(physical, setting)
        except RuntimeError as error:
            raise _devices_started_error(call) from error


def _devices_started_error(call: str) -> DevicesInitializedError:
    return DevicesInitializedError(
        f"{call} came after TensorFlow had started its devices. Their settings are final then, so "
        "nothing was changed. These start the devices: the first tensor, tf.Variable, tf.data "
        "dataset or tf.random.Generator, a Keras model, optimizer or metric, any tf.distribute "
        "strategy, tf.config.list_logical_devices and tf.config.experimental.get_memory_info. "
        "Move this line up, directly after the imports; in a notebook restart the kernel first."
    )
