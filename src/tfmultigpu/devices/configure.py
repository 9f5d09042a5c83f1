"""Device settings, which must be made before TensorFlow starts the devices.

Every setting is all or none: each function checks its arguments before it changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tfmultigpu.arguments import brief, check_count
from tfmultigpu.devices.discovery import Device, list_devices, logical_to_physical, why_no_more_gpus
from tfmultigpu.devices.names import listed, parse_device_name, resolve_devices
from tfmultigpu.errors import DevicesInitializedError, TfMultiGpuError

_config: Any = tf.config
_MIB = 1024**2
_FORCE_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


def enable_memory_growth(devices: Sequence[str] | None = None) -> tuple[Device, ...]:
    """Lets GPUs allocate memory as they need it, instead of all of it at the start.

    Args:
        devices: The names of all visible GPUs, because TensorFlow needs the same setting on all;
            `None` means all.

    Returns:
        The GPUs with memory growth; empty on a machine without GPUs.

    Raises:
        DevicesInitializedError: TensorFlow started its devices without memory growth.
        TfMultiGpuError: A visible GPU is left out, or a device is split or limited.

    Example:
        >>> for gpu in enable_memory_growth():
        ...     print(gpu.name, "takes memory as it needs it")
    """
    call = "enable_memory_growth()"
    if devices is not None:
        call = f"enable_memory_growth({devices!r})"
    gpus = _by_name(_config.get_visible_devices("GPU"))
    if devices is None and not gpus:
        return ()
    chosen = _resolve(devices, gpus, "Only GPUs have memory growth: leave devices out.")
    growing = _growing(gpus)
    off = [name for name in gpus if name not in growing]
    left_out = [name for name in off if name not in chosen]
    if left_out:
        raise TfMultiGpuError(
            f"{call} leaves out {listed(left_out)}. TensorFlow would fail at the first operation: "
            "memory growth cannot differ between GPUs.",
            "",
            "Write enable_memory_growth() for all, or first hide those with "
            "tf.config.set_visible_devices.",
        )
    divided = []
    for name, device in _by_name(_config.list_physical_devices()).items():
        if _config.get_logical_device_configuration(device):
            divided.append(name)
    _check_compatible(call, list(gpus), divided)
    with _explaining_late_settings(call):
        for name in off:
            if name not in divided:
                _config.experimental.set_memory_growth(gpus[name], True)
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
            f"limit_memory({brief(limits)}). Write bytes for each: "
            'limit_memory({"GPU:0": 8 * 1024**3}).'
        )
    call = f"limit_memory({dict(limits)!r})"
    visible = _by_name(_config.get_visible_devices())
    names: tuple[str, ...] = ()
    if limits:
        gpu = "Name a GPU, or leave the line out where there is none."
        names = _resolve(list(limits), visible, gpu)
    wanted = {}
    for name, limit in zip(names, limits.values(), strict=True):
        wanted[visible[name]] = _checked_sizes(name, 1, [limit], call)
        parts = len(_config.get_logical_device_configuration(visible[name]) or ())
        if parts > 1:
            raise TfMultiGpuError(
                f"{call} would undo the split of {name} into {parts} parts.",
                "",
                f'Give the limit with the split: split_device("{name}", parts={parts}, '
                f"memory={limit // parts}).",
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
        memory: Bytes of each part of a GPU: one number, or one per part. `None` divides nine tenths
            of the free memory, which needs the extra `nvml`. It must be `None` for a CPU.

    Returns:
        The names of the parts. TensorFlow numbers the parts of `GPU:1` after the parts of `GPU:0`,
        so split in that order.

    Raises:
        DevicesInitializedError: TensorFlow started its devices without this split.
        TfMultiGpuError: Memory growth is on, or TensorFlow cannot split the device this way.
        ValueError: `parts` or `memory` does not fit the other or the device.

    Example:
        >>> names = split_device("CPU:0", parts=4)
        >>> tf.distribute.MirroredStrategy(names).num_replicas_in_sync
        4
    """
    call = f"split_device({device!r}, parts={parts!r}, memory={memory!r})"
    parts = check_count("parts", parts)
    visible = _by_name(_config.get_visible_devices())
    (name,) = _resolve(
        [device], visible, f'Write split_device("{next(iter(visible))}", parts={parts}).'
    )
    sizes: tuple[int | None, ...] = (None,) * parts
    if not name.startswith("CPU:") or memory is not None:
        sizes = _checked_sizes(name, parts, memory, call)
    _divide({visible[name]: sizes}, call)
    return tuple(part for part, physical in logical_to_physical().items() if physical == name)


def devices_started() -> bool:
    """Returns whether TensorFlow has started its devices; starts none."""
    # TensorFlow tells only by refusing a setting: try one, and restore it.
    threading = _config.threading
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


def _growing(gpus: Mapping[str, Any]) -> list[str]:
    """Returns the names of the GPUs that have memory growth."""
    return [name for name, gpu in gpus.items() if _config.experimental.get_memory_growth(gpu)]


def _resolve(
    asked: Sequence[str] | None, existing: Mapping[str, Any], write: str
) -> tuple[str, ...]:
    """Returns the names asked for; the error says why there are no more GPUs, and what to write."""
    return resolve_devices(asked, tuple(existing), why_no_more_gpus(), write)


def _checked_sizes(
    name: str, parts: int, memory: int | Sequence[int] | None, call: str
) -> tuple[int, ...]:
    """Returns the bytes of each part of a GPU."""
    if not name.startswith("GPU:"):
        raise TfMultiGpuError(
            f"{call}: TensorFlow limits the memory of GPUs only.",
            "",
            f"For {name} leave memory out.",
        )
    (gpu,) = [gpu for gpu in list_devices("GPU") if gpu.name == name]
    if memory is None and gpu.memory_free is None:
        raise ValueError(
            f"{call}: the parts of a GPU need a memory limit, and the free memory of {name} is "
            "unknown. Give bytes, such as memory=4 * 1024**3, or install the extra that asks the "
            "driver: pip install nvidia-ml-py."
        )
    if memory is None:
        memory = int(0.9 * (gpu.memory_free or 0)) // parts
    sizes = tuple(memory) if isinstance(memory, Sequence) else (memory,) * parts
    if len(sizes) != parts:
        raise ValueError(
            f"{call} has {len(sizes)} memory limits for {parts} parts. Give one for all parts, or "
            "one for each."
        )
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < _MIB:
            raise ValueError(
                f"{call}: a memory limit is a whole number of bytes, at least 1 MiB; 8 GiB is "
                f"8 * 1024**3. Received: {brief(size)}"
            )
    if gpu.memory_total is not None and sum(sizes) > gpu.memory_total:
        raise ValueError(
            f"{call} needs {sum(sizes)} bytes, but {name} has {gpu.memory_total}. Ask for less."
        )
    return sizes


def _divide(wanted: Mapping[Any, tuple[int | None, ...]], call: str) -> None:
    """Splits or limits devices: memory limits in bytes, one per part, by physical device."""
    settings = {}
    for physical, sizes in wanted.items():
        setting = []
        for size in sizes:
            limit = size and size // _MIB
            setting.append(_config.LogicalDeviceConfiguration(memory_limit=limit))
        now = _config.get_logical_device_configuration(physical)
        if now != setting and not (now is None and sizes == (None,)):
            settings[physical] = setting
    growing = _growing(_by_name(_config.get_visible_devices("GPU")))
    _check_compatible(call, growing, list(_by_name(list(settings))))
    with _explaining_late_settings(call):
        for physical, setting in settings.items():
            _config.set_logical_device_configuration(physical, setting)


def _check_compatible(call: str, growing: Sequence[str], divided: Sequence[str]) -> None:
    if growing and divided and os.environ.get(_FORCE_GROWTH) != "true":
        raise TfMultiGpuError(
            f"{call}: {listed(divided)} split or limited, and memory growth of {listed(growing)}, "
            "exclude each other. TensorFlow drops memory growth of every GPU, without a message, "
            "if any device is split or limited, even the CPU.",
            "",
            f'Remove one of the two lines, or set os.environ["{_FORCE_GROWTH}"] = "true" before '
            "the first operation instead.",
        )


@contextmanager
def _explaining_late_settings(call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DevicesInitializedError(
            f"{call} came after TensorFlow had started its devices. Their settings are final "
            "then, so nothing was changed. The first tensor, tf.Variable, dataset, Keras object "
            "or strategy starts them, and so does tf.config.list_logical_devices.",
            "",
            "Move this line up, directly after the imports; in a notebook restart the kernel "
            "first.",
        ) from error
