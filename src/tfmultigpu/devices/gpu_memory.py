"""GPU memory from the NVIDIA driver, matched to the GPUs of TensorFlow.

TensorFlow must start a GPU to know its memory. The driver tells it through NVML (extra `nvml`),
which numbers all GPUs by PCI bus. TensorFlow sees those that CUDA shows to this process, in CUDA's
order. If the two cannot be matched with certainty, the memory is unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class NvmlGpu(NamedTuple):
    """A GPU of the driver; its memory in bytes, `None` if the driver does not know it."""

    uuid: str
    name: str
    memory_total: int | None = None
    memory_free: int | None = None


def read_gpus() -> tuple[NvmlGpu, ...]:
    """Asks the driver for all GPUs of the machine, in PCI order; creates no CUDA context.

    Empty without the package, without a driver, or if one GPU does not answer: leaving that one
    out would renumber those after it.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        count = nvml.nvmlDeviceGetCount()
        gpus = []
        for number in range(count):
            gpus.append(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(number)))
        return tuple(gpus)
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, handle: Any) -> NvmlGpu:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:  # The GPU shares the memory of the CPU.
        return NvmlGpu(uuid, name)
    return NvmlGpu(uuid, name, int(memory.total), int(memory.free))


def match_gpus(
    models: Sequence[str | None], gpus: Sequence[NvmlGpu], environ: Mapping[str, str]
) -> tuple[NvmlGpu | None, ...]:
    """Finds the driver's GPU for each GPU of TensorFlow; all `None` if that is not certain; pure.

    CUDA numbers equal GPUs by PCI bus, as NVML does. It numbers different models by speed, which
    NVML does not know, unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`. Under MIG the models differ.
    """
    unknown = (None,) * len(models)
    alike = len({gpu.name for gpu in gpus}) == 1
    in_order = alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    by_entry = {}  # How CUDA_VISIBLE_DEVICES may name a GPU.
    for index, gpu in enumerate(gpus):
        by_entry[gpu.uuid] = gpu
        if in_order:
            by_entry[str(index)] = gpu

    every = ",".join(map(str, range(len(gpus))))
    shown = []
    for entry in environ.get("CUDA_VISIBLE_DEVICES", every).split(","):
        if entry.strip() not in by_entry:
            return unknown
        shown.append(by_entry[entry.strip()])
    if [_plain(gpu.name) for gpu in shown] != [_plain(model) for model in models]:
        return unknown
    return tuple(shown)


def _plain(model: str | None) -> str:
    return (model or "").lower().removeprefix("nvidia ").strip()
