"""Device settings, which must be made before TensorFlow starts the devices.

Every setting is all or none: each function checks its arguments before it changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import check_count
from tfmultigpu.devices.discovery import Device, list_devices, logical_to_physical
from tfmultigpu.devices.missing_gpus import why_no_more_gpus
from tfmultigpu.devices.names import listed, parse_device_name, resolve_devices
from tfmultigpu.errors import DevicesInitializedError, TfMultiGpuError

_MIB = 1024**2
_FORCE_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def enable_memory_growth(devices: Sequence[str] | None = None) -> tuple[Device, ...]:
    """Lets GPUs allocate memory as they need it, instead of all of it at the start.

    Args:
        devices: All visible GPUs, by name, because TensorFlow needs the same setting on all; `None`
            takes them without naming them.

    Returns:
        The GPUs with memory growth; empty on a machine without GPUs.

    Raises:
        DevicesInitializedError: TensorFlow started its devices without memory growth.
        TfMultiGpuError: A visible GPU is left out, or a device is split or limited.

    Example:
        >>> for gpu in enable_memory_growth():
        ...     print(gpu.name, "takes memory as it needs it")
    """
    call = f"enable_memory_growth({'' if devices is None else repr(devices)})"
    config: Any = tf.config
    gpus = _by_name(config.get_visible_devices("GPU"))
    if devices is None and not gpus:
        return ()
    chosen = _resolve(devices, gpus)
    off = [name for name, gpu in gpus.items() if not config.experimental.get_memory_growth(gpu)]
    left_out = [name for name in off if name not in chosen]
    if left_out:
        raise TfMultiGpuError(
            f"{call} leaves out {listed(left_out)}. TensorFlow would fail at the first operation: "
            "memory growth cannot differ between GPUs. Write enable_memory_growth() for all, or "
            "first hide those with tf.config.set_visible_devices."
        )
    all_devices = _by_name(config.list_physical_devices())
    divided = [n for n, d in all_devices.items() if config.get_logical_device_configuration(d)]
    _check_compatible(call, list(gpus), divided)
    with _explaining_late_settings(call):
        for name in [name for name in off if name not in divided]:
            config.experimental.set_memory_growth(gpus[name], True)
    return tuple(device for device in list_devices("GPU") if device.name in gpus)


def limit_memory(limits: Mapping[str, int]) -> None:
    """Limits the memory that TensorFlow takes on each GPU.

    Args:
        limits: Bytes per physical GPU, rounded down to whole MiB. GPUs that are not named keep
            their limit.

    Raises:
        DevicesInitializedError: TensorFlow started its devices with other limits.
        TfMultiGpuError: A device is not a GPU or is split, or memory growth is on.
        ValueError: A limit is below 1 MiB, above the memory of the GPU, or given twice.

    Example:
        >>> limit_memory({gpu.name: 8 * 1024**3 for gpu in list_devices("GPU")})
    """
    if not isinstance(limits, Mapping):
        raise TypeError(
            "limit_memory needs to know which GPU has which limit. Received: "
            f"limit_memory({limits!r}). Write bytes for each: "
            'limit_memory({"GPU:0": 8 * 1024**3}).'
        )
    call = f"limit_memory({dict(limits)!r})"
    config: Any = tf.config
    visible = _by_name(config.get_visible_devices())
    names = _resolve(list(limits), visible) if limits else ()
    wanted = {}
    for name, limit in zip(names, limits.values(), strict=True):
        wanted[visible[name]] = _checked_sizes(name, 1, [limit], call)
        parts = len(config.get_logical_device_configuration(visible[name]) or ())
        if parts > 1:
            raise TfMultiGpuError(
                f"{call} would undo the split of {name} into {parts} parts. Give the limit with "
                f'the split: split_device("{name}", parts={parts}, memory={limit // parts}).'
            )
    _divide(wanted, call)


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
        The names of the parts. TensorFlow numbers the parts of `GPU:1` after the parts of `GPU:0`,
        so split in that order.

    Raises:
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
    visible = _by_name(config.get_visible_devices())
    (name,) = _resolve([device], visible)
    sizes: tuple[int | None, ...] = (None,) * parts
    if not name.startswith("CPU:") or memory is not None:
        sizes = _checked_sizes(name, parts, memory, call)
    _divide({visible[name]: sizes}, call)
    return tuple(part for part, physical in logical_to_physical().items() if physical == name)


def devices_started() -> bool:
    """Returns whether TensorFlow has started its devices; starts none."""
    # TensorFlow tells only by refusing a setting: try one, and restore it.
    threading: Any = tf.config.threading
    try:
        before = threading.get_inter_op_parallelism_threads()
    except ValueError:
        return False  # Its settings contradict each other, so it cannot have started.
    try:
        threading.set_inter_op_parallelism_threads(before + 1)
        threading.set_inter_op_parallelism_threads(before)
    except RuntimeError:
        return True
    return False


def _by_name(devices: Sequence[Any]) -> dict[str, Any]:
    """Returns TensorFlow's physical devices by their short names."""
    return {parse_device_name(device.name): device for device in devices}


def _resolve(asked: Any, existing: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names asked for; the error says why there are no more GPUs."""
    return resolve_devices(asked, tuple(existing), why_no_more_gpus())


def _checked_sizes(
    name: str, parts: int, memory: int | Sequence[int] | None, call: str
) -> tuple[int, ...]:
    """Returns the bytes of each part of a GPU."""
    if not name.startswith("GPU:"):
        raise TfMultiGpuError(
            f"{call}: TensorFlow limits the memory of GPUs only. For {name} leave memory out."
        )
    (gpu,) = [gpu for gpu in list_devices("GPU") if gpu.name == name]
    if memory is None and gpu.memory_free is None:
        raise ValueError(
            f"{call}: the parts of a GPU need a memory limit, and the free memory of {name} is "
            "unknown. Give bytes, such as memory=4 * 1024**3, or install the extra that asks the "
            'driver: pip install "tfmultigpu[nvml]".'
        )
    if memory is None:
        memory = int(0.9 * (gpu.memory_free or 0)) // parts
    sizes = tuple(memory) if isinstance(memory, Sequence) else (memory,) * parts
    if len(sizes) != parts:
        raise ValueError(
            f"{call} has {len(sizes)} memory limits for {parts} parts. Give one for all, or each."
        )
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < _MIB:
            raise ValueError(
                f"{call}: a memory limit is a whole number of bytes, at least 1 MiB; 8 GiB is "
                f"8 * 1024**3. Received: {size!r}"
            )
    if gpu.memory_total is not None and sum(sizes) > gpu.memory_total:
        raise ValueError(
            f"{call} needs {sum(sizes)} bytes, but {name} has {gpu.memory_total}. Ask for less."
        )
    return sizes


def _divide(wanted: Mapping[Any, tuple[int | None, ...]], call: str) -> None:
    """Splits or limits devices: memory limits in bytes, one per part, by physical device."""
    config: Any = tf.config
    settings = {}
    for physical, sizes in wanted.items():
        setting = [
            config.LogicalDeviceConfiguration(memory_limit=size and size // _MIB) for size in sizes
        ]
        now = config.get_logical_device_configuration(physical)
        if now != setting and not (now is None and sizes == (None,)):
            settings[physical] = setting
    gpus = _by_name(config.get_visible_devices("GPU"))
    growing = [name for name, gpu in gpus.items() if config.experimental.get_memory_growth(gpu)]
    _check_compatible(call, growing, list(_by_name(list(settings))))
    with _explaining_late_settings(call):
        for physical, setting in settings.items():
            config.set_logical_device_configuration(physical, setting)


def _check_compatible(call: str, growing: Sequence[str], divided: Sequence[str]) -> None:
    if growing and divided and os.environ.get(_FORCE_GROWTH) != "true":
        raise TfMultiGpuError(
            f"{call}: {listed(divided)} split or limited, and memory growth of {listed(growing)}, "
            "exclude each other. TensorFlow drops memory growth of every GPU, without a message, "
            "if any device is split or limited, even the CPU. Remove one of the two lines, or set "
            f'os.environ["{_FORCE_GROWTH}"] = "true" before the first operation instead.'
        )


@contextmanager
def _explaining_late_settings(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DevicesInitializedError(
            f"{call} came after TensorFlow had started its devices. Their settings are final then, "
            "so nothing was changed. The first tensor, tf.Variable, dataset, Keras object or "
            "strategy starts them, and so does tf.config.list_logical_devices. Move this line up, "
            "directly after the imports; in a notebook restart the kernel first."
        ) from error
