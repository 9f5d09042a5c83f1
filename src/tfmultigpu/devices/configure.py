"""The devices of this machine, and the settings that must be made before TensorFlow starts them.

Every setting is all or none: what can be refused is refused before anything changes.
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
from tfmultigpu.errors import DeviceNotFoundError, DeviceSettingsError, DevicesInitializedError

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
    """Let the GPUs take memory as they need it, instead of all of it at the start.

    TensorFlow has one such setting for all GPUs, so it is made for all visible GPUs or for none.
    Calling it again changes nothing.

    Args:
        devices: the GPUs, if the line should say which; they must be all that are visible.

    Returns:
        The GPUs that grow; empty on a machine without one.

    Raises:
        DeviceNotFoundError: a GPU was named that is not there.
        DevicesInitializedError: TensorFlow has started its devices, and growth is not on.
        DeviceSettingsError: some GPUs were left out, or a device was split or limited.

    Example:
        >>> for gpu in enable_memory_growth():
        ...     print(gpu.name, "takes memory as it needs it")
    """
    call = f"enable_memory_growth({'' if devices is None else repr(devices)})"
    config = _config()
    gpus = {parse_device_name(gpu.name): gpu for gpu in config.get_visible_devices("GPU")}
    if devices is None and not gpus:
        return ()
    chosen = resolve_devices(devices, tuple(gpus))
    growing = {name for name, gpu in gpus.items() if config.experimental.get_memory_growth(gpu)}
    left_out = [name for name in gpus if name not in growing.union(chosen)]
    if left_out:
        raise DeviceSettingsError(
            f"{call} leaves out {listed(left_out)}. TensorFlow would fail at the first operation: "
            "memory growth cannot differ between GPUs. Call enable_memory_growth() for all, or "
            f"first hide the others: restrict_devices({list(chosen)})."
        )
    divided = _divided(config)
    if divided and not _growth_forced():
        raise DeviceSettingsError(
            f"{call} came after {listed(divided)} was split or limited. TensorFlow then drops "
            "memory growth of every GPU without a word. Take out one of the two lines, or set "
            f"{_FORCE_GROWTH} before the first operation instead of calling this."
        )
    _grow({name: gpu for name, gpu in gpus.items() if name not in growing}, call)
    return tuple(device for device in visible_devices("GPU") if device.name in gpus)


def limit_memory(limits: Mapping[str, int]) -> None:
    """Give GPUs at most so much memory each.

    Args:
        limits: bytes per physical GPU; TensorFlow counts whole MiB, the rest is cut off. GPUs
            not named keep what they had. An empty mapping changes nothing.

    Raises:
        DeviceNotFoundError: a device was named that is not there, or is hidden.
        DevicesInitializedError: TensorFlow has started its devices with other limits.
        DeviceSettingsError: the device is no GPU, is split, or memory growth is on.
        ValueError: a limit is below 1 MiB, above the memory of the GPU, or given twice.

    Example:
        >>> limit_memory({gpu.name: 8 * 1024**3 for gpu in list_devices("GPU")})
    """
    call = f"limit_memory({dict(limits)!r})"
    names = [parse_device_name(name) for name in limits]
    if len(set(names)) < len(names):
        raise ValueError(f"{call} gives one device two limits. Name each device once.")
    config = _config()
    wanted = {}
    for name, limit in zip(names, limits.values(), strict=True):
        physical = _visible(config, name, call)
        if not name.startswith("GPU:"):
            raise DeviceSettingsError(
                f"{call}: TensorFlow can limit the memory of GPUs only, not of {name}. Leave "
                f"{name} out."
            )
        _check_bytes((limit,), name, call)
        parts = len(config.get_logical_device_configuration(physical) or ())
        if parts > 1:
            raise DeviceSettingsError(
                f"{call}: {name} is split into {parts} parts, which this limit would join again. "
                "Give the limit where it is split: "
                f'split_device("{name}", parts={parts}, memory={limit // parts}).'
            )
        wanted[physical] = (limit,)
    _divide(config, wanted, call)


def split_device(
    device: str, parts: int, memory: int | Sequence[int] | None = None
) -> tuple[str, ...]:
    """Make several logical devices of one CPU or GPU, to try replicas where there is one device.

    The parts share the device: this tests a program, it does not make it faster. Splitting again
    before TensorFlow starts replaces the first split.

    Args:
        device: a visible physical device, `"CPU:0"` or `"GPU:0"`.
        parts: how many, at least 1.
        memory: for a GPU, bytes of each part, one number or one per part; `None` divides nine
            tenths of the memory that is free now, which needs the extra `nvml`. For a CPU `None`.

    Returns:
        The names of the parts. Logical devices are numbered over all devices of a kind: the parts
        of `GPU:1` come after those of `GPU:0`, so split in that order.

    Raises:
        DeviceNotFoundError: the device is not there, or is hidden.
        DevicesInitializedError: TensorFlow has started its devices, and not with this split.
        DeviceSettingsError: memory growth is on, or the device cannot be split like this.
        ValueError: `parts` or `memory` make no sense together or for this device.

    Example:
        >>> names = split_device("CPU:0", parts=4)  # doctest: +SKIP
        >>> strategy = tf.distribute.MirroredStrategy(names)  # doctest: +SKIP
    """
    call = f"split_device({device!r}, parts={parts!r}, memory={memory!r})"
    parts = check_count("parts", parts)
    config = _config()
    name = parse_device_name(device)
    physical = _visible(config, name, call)
    kind = name.split(":")[0]
    if kind == "CPU":
        if memory is not None:
            raise DeviceSettingsError(
                f"{call}: TensorFlow cannot limit the memory of CPU parts. Leave memory out."
            )
        sizes: tuple[int | None, ...] = (None,) * parts
    elif kind == "GPU":
        sizes = _sizes(name, parts, memory, call)
    else:
        raise DeviceSettingsError(f"{call}: TensorFlow can split CPUs and GPUs only.")
    _divide(config, {physical: sizes}, call)
    return tuple(part for part, owner in logical_to_physical().items() if owner == name)


def restrict_devices(devices: int | Sequence[str], kind: str = "GPU") -> tuple[Device, ...]:
    """Let TensorFlow use these physical devices of a kind only; other kinds stay as they are.

    The logical devices are numbered anew: with `GPU:1` alone, programs run on the logical
    `GPU:0`. TensorFlow keeps the order of the machine whatever the order here.

    Args:
        devices: names from `list_devices`, or a count; `[]` hides all GPUs.
        kind: the kind to restrict.

    Returns:
        The devices of this kind that are visible now.

    Raises:
        DeviceNotFoundError: a device was named that is not there.
        DevicesInitializedError: TensorFlow has started its devices with others.
        DeviceSettingsError: no CPU would be left, and TensorFlow cannot start without one.
        ValueError: a device is named twice.

    Example:
        >>> restrict_devices([], kind="GPU")  # doctest: +SKIP
        ()
    """
    call = f"restrict_devices({devices!r}, kind={kind!r})"
    kind = kind.upper()
    config = _config()
    physical = {parse_device_name(one.name): one for one in config.list_physical_devices(kind)}
    nothing = not isinstance(devices, int) and len(devices) == 0
    if nothing and kind == "CPU":
        raise DeviceSettingsError(
            f"{call} leaves no CPU, and TensorFlow cannot start without one. Keep CPU:0."
        )
    chosen = () if nothing else resolve_devices(devices, tuple(physical))
    wanted = [one for name, one in physical.items() if name in chosen]
    if set(wanted) != set(config.get_visible_devices(kind)):
        try:
            config.set_visible_devices(wanted, kind)
        except RuntimeError as error:
            raise _too_late(call) from error
    return visible_devices(kind)


def _config() -> Any:
    return tf.config


def _visible(config: Any, name: str, call: str) -> Any:
    devices = {parse_device_name(one.name): one for one in config.get_visible_devices()}
    if name in devices:
        return devices[name]
    hidden = [parse_device_name(one.name) for one in config.list_physical_devices()]
    raise DeviceNotFoundError(
        f"{call}: there is no {name}"
        + (" in use: it is hidden from TensorFlow" if name in hidden else " here")
        + f". Asked for: {name}. Existing: {listed(tuple(devices))}. Name one of these"
        + (f", or show {name} first with restrict_devices." if name in hidden else ".")
    )


def _divided(config: Any) -> tuple[str, ...]:
    physical = config.list_physical_devices()
    divided = (one for one in physical if config.get_logical_device_configuration(one) is not None)
    return tuple(parse_device_name(one.name) for one in divided)


def _growth_forced() -> bool:
    return os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"


def _grow(gpus: Mapping[str, Any], call: str) -> None:
    experimental = _config().experimental
    before = {name: experimental.get_memory_growth(gpu) for name, gpu in gpus.items()}
    done: list[str] = []
    try:
        for name, gpu in gpus.items():
            experimental.set_memory_growth(gpu, True)
            done.append(name)
    except (RuntimeError, ValueError) as error:
        for name in done:
            # Refused only where another thread has just started the devices: final anyway.
            with contextlib.suppress(RuntimeError):
                experimental.set_memory_growth(gpus[name], before[name])
        if isinstance(error, RuntimeError):
            raise _too_late(call) from error
        raise DeviceSettingsError(
            f"{call}: TensorFlow refused: {error}. Memory growth was left as it was."
        ) from error


def _sizes(name: str, parts: int, memory: int | Sequence[int] | None, call: str) -> tuple[int, ...]:
    if memory is None:
        free = next((one.memory_free for one in list_devices("GPU") if one.name == name), None)
        if free is None:
            raise ValueError(
                f"{call}: the parts of a GPU need a memory limit, and how much is free is not "
                "known here. Give bytes, as in memory=4 * 1024**3, or install the extra that asks "
                "the driver: pip install 'tfmultigpu[nvml]'."
            )
        memory = int(0.9 * free) // parts
    sizes = (memory,) * parts if isinstance(memory, int) else tuple(memory)
    if len(sizes) != parts:
        raise ValueError(
            f"{call}: {len(sizes)} memory limits for {parts} parts. Give one number for all, or "
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
            f"{call}: {sum(sizes)} bytes in all, but {name} has {total}. Ask for less."
        )


def _divide(config: Any, wanted: Mapping[Any, tuple[int | None, ...]], call: str) -> None:
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
        raise DeviceSettingsError(
            f"{call} came after memory growth was turned on for {listed(growing)}. TensorFlow "
            "drops memory growth of every GPU, without a word, as soon as any device is split or "
            "limited, the CPU included. Take out enable_memory_growth(), and if memory should "
            f"still grow, set {_FORCE_GROWTH} before the first operation."
        )
    # TensorFlow cannot take a split back, so everything that can be refused was checked above;
    # what is left, devices that have started, refuses the first of these and so all.
    for physical, setting in settings.items():
        try:
            config.set_logical_device_configuration(physical, setting)
        except RuntimeError as error:
            raise _too_late(call) from error


def _too_late(call: str) -> DevicesInitializedError:
    return DevicesInitializedError(
        f"{call} came after TensorFlow had started its devices; from then on they cannot be "
        "changed, and nothing was. What starts them: the first tensor, tf.Variable, tf.data "
        "dataset or tf.random.Generator, a Keras model, optimizer or metric, any tf.distribute "
        "strategy, tf.config.list_logical_devices and tf.config.experimental.get_memory_info. "
        "Move this line up, directly after the imports; in a notebook restart the kernel first."
    )
