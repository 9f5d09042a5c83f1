"""GPUs that are busy or idle, with or without memory traffic, by the library of the driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class _Rates(ctypes.Structure):
    """``nvmlUtilization_t``: percent of the last second or less."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: bytes."""

    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


def read_activity(
    library: str = _LIBRARY, environ: Mapping[str, str] = os.environ
) -> list[dict[str, Any]]:
    """Returns for each GPU that this process may see how busy it is; empty without a driver.

    ``busy`` and ``memory_traffic`` are in percent of the time, ``memory_used`` and
    ``memory_total`` in bytes; None if the driver does not say. Starts no GPU.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    gpus = []
    for number in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0:
            gpus.append(_read(nvml, number, device))
    nvml.nvmlShutdown()
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return gpus
    names = [entry.strip() for entry in shown.split(",")]
    return [gpu for gpu in gpus if str(gpu["index"]) in names or gpu["uuid"] in names]


def _read(nvml: ctypes.CDLL, number: int, device: ctypes.c_void_p) -> dict[str, Any]:
    rates, memory, uuid = _Rates(), _Memory(), ctypes.create_string_buffer(96)
    gpu: dict[str, Any] = dict.fromkeys(("busy", "memory_traffic", "memory_used", "memory_total"))
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) == 0:
        gpu |= {"busy": int(rates.gpu), "memory_traffic": int(rates.memory)}
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
        gpu |= {"memory_used": int(memory.used), "memory_total": int(memory.total)}
    nvml.nvmlDeviceGetUUID(device, uuid, len(uuid))
    return {"index": number, "uuid": uuid.value.decode(errors="replace"), **gpu}


def in_words(gpus: list[Any]) -> str:
    """Returns what the GPUs of a process do, and what that means; empty if it is not known."""
    known = [gpu for gpu in gpus if gpu["busy"] is not None]
    said = []
    for gpu in known:
        said.append(f"GPU {gpu['index']} {gpu['busy']} %, memory {gpu['memory_traffic']} %")
    if not known:
        return ""
    means = "they compute"
    if all(gpu["busy"] < 5 for gpu in known):
        means = "they are idle and wait for input or for the host"
    elif all(gpu["busy"] > 90 and gpu["memory_traffic"] < 5 for gpu in known):
        means = "busy without memory traffic is a collective that waits for another GPU"
    return f"{'; '.join(said)}: {means}"
