"""What the NVIDIA driver says about GPU memory, and which of its GPUs TensorFlow calls `GPU:0`.

TensorFlow cannot tell the memory of a GPU without starting it; the driver can, through NVML (the
package `nvidia-ml-py`, extra `nvml`). NVML numbers all GPUs of the machine by PCI bus, while
TensorFlow sees those that CUDA shows to this process, in CUDA's order. Where the two cannot be
matched with certainty the answer is "unknown": no number is better than another GPU's number.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Nvml", "NvmlGpu", "match_gpus", "read_gpus", "visible_gpus"]


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU, or a MIG instance of one, as the driver sees it.

    Attributes:
        uuid: `"GPU-..."` or `"MIG-..."`.
        name: the model, such as `"NVIDIA A100-SXM4-80GB"`.
        memory_total: bytes, or `None` where the driver does not say.
        memory_free: bytes free now, counting every process, or `None`.
        mig_mode: whether the GPU is cut into MIG instances; CUDA then runs on one of those.
        instances: the MIG instances.
    """

    uuid: str
    name: str
    memory_total: int | None = None
    memory_free: int | None = None
    mig_mode: bool = False
    instances: tuple[NvmlGpu, ...] = ()


class Nvml(Protocol):
    """The few functions of the module `pynvml` that are used here."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> object: ...  # noqa: D102
    def nvmlShutdown(self) -> object: ...  # noqa: D102
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...  # noqa: D102
    def nvmlDeviceGetName(self, handle: Any, /) -> str | bytes: ...  # noqa: D102
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str | bytes: ...  # noqa: D102
    def nvmlDeviceGetMemoryInfo(self, handle: Any, /) -> Any: ...  # noqa: D102
    def nvmlDeviceGetMigMode(self, handle: Any, /) -> Sequence[int]: ...  # noqa: D102
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, /) -> int: ...  # noqa: D102
    def nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: D102
        self, handle: Any, index: int, /
    ) -> Any: ...


def read_gpus(nvml: Nvml | None = None) -> tuple[NvmlGpu, ...]:
    """Ask the driver for all GPUs of the machine, in PCI order; creates no CUDA context.

    Args:
        nvml: the module `pynvml`, or one like it; imported if not given.

    Returns:
        The GPUs; empty without the package, without a driver, or where the driver refuses.

    Example:
        >>> for gpu in read_gpus():
        ...     print(gpu.name, gpu.memory_free)
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        return tuple(_read(nvml, handle) for handle in handles)
    except nvml.NVMLError:
        # One GPU that does not answer shifts the numbers of all that follow.
        return ()
    finally:
        nvml.nvmlShutdown()


def visible_gpus(gpus: Sequence[NvmlGpu], asked: str | None) -> tuple[NvmlGpu, ...]:
    """Choose the GPUs that `CUDA_VISIBLE_DEVICES` shows, in the order it shows them.

    The first entry that names no GPU ends the list, `-1` included; an entry that appears twice
    empties it; entries of another sort than the first (indices, `GPU-`, `MIG-`) end it; of MIG
    instances CUDA uses the first only.

    Args:
        gpus: all GPUs of the machine, in the order that indices count.
        asked: the value of `CUDA_VISIBLE_DEVICES`; `None` where it is not set.

    Example:
        >>> two = (NvmlGpu("GPU-aa", "A100"), NvmlGpu("GPU-bb", "A100"))
        >>> [gpu.uuid for gpu in visible_gpus(two, "1,0")]
        ['GPU-bb', 'GPU-aa']
        >>> [gpu.uuid for gpu in visible_gpus(two, "0,7,1")]
        ['GPU-aa']
    """
    if asked is None:
        return tuple(gpus)
    entries = [entry.strip() for entry in asked.split(",")]
    sort = _sort(entries[0])
    chosen: list[NvmlGpu] = []
    for entry in entries:
        gpu = _named(entry, gpus) if _sort(entry) == sort else None
        if gpu is None:
            break
        if gpu in chosen:
            return ()
        chosen.append(gpu)
    return tuple(chosen[:1] if sort == "MIG-" else chosen)


def match_gpus(
    models: Sequence[str | None], gpus: Sequence[NvmlGpu], environment: Mapping[str, str]
) -> tuple[NvmlGpu | None, ...]:
    """Find the driver's GPU for each GPU of TensorFlow; `None` where it is not certain.

    CUDA numbers equal GPUs by PCI bus, as NVML does. GPUs of different models it numbers by
    speed, in an order that NVML does not know, unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`.

    Args:
        models: TensorFlow's description of GPU:0, GPU:1, ...; `None` where it has none.
        gpus: all GPUs of the machine, from `read_gpus`.
        environment: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` as the process started with.

    Returns:
        As many as `models`.

    Example:
        >>> two = (NvmlGpu("GPU-aa", "Tesla T4"), NvmlGpu("GPU-bb", "NVIDIA A100"))
        >>> [gpu and gpu.uuid for gpu in match_gpus(["NVIDIA A100", "Tesla T4"], two, {})]
        ['GPU-bb', 'GPU-aa']
    """
    unknown: tuple[None, ...] = (None,) * len(models)
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    by_uuid = asked is not None and _sort(asked.split(",")[0].strip()) != "index"
    if any(gpu.mig_mode for gpu in (visible_gpus(gpus, asked) if by_uuid else gpus)):
        return unknown
    equal = len({gpu.name for gpu in gpus}) <= 1
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not (by_uuid or by_bus or equal):
        return _match_by_model(models, gpus, renumbered=asked is not None)
    # TensorFlow leaves out GPUs that are too small or too old: always all of one model.
    shown = [gpu for gpu in visible_gpus(gpus, asked) if any(_same(model, gpu) for model in models)]
    if len(shown) != len(models) or not all(map(_same, models, shown)):
        return unknown
    return tuple(shown)


def _match_by_model(
    models: Sequence[str | None], gpus: Sequence[NvmlGpu], *, renumbered: bool
) -> tuple[NvmlGpu | None, ...]:
    found: list[NvmlGpu | None] = []
    for position, model in enumerate(models):
        alike = [gpu for gpu in gpus if model is not None and _same(model, gpu)]
        certain = len(alike) == models.count(model) and (len(alike) == 1 or not renumbered)
        found.append(alike[models[:position].count(model)] if certain else None)
    return tuple(found)


def _same(model: str | None, gpu: NvmlGpu) -> bool:
    def plain(name: str) -> str:
        return name.lower().removeprefix("nvidia ").strip()

    return model is None or plain(model) == plain(gpu.name)


def _sort(entry: str) -> str:
    return next((prefix for prefix in ("GPU-", "MIG-") if entry.startswith(prefix)), "index")


def _named(entry: str, gpus: Sequence[NvmlGpu]) -> NvmlGpu | None:
    sort = _sort(entry)
    if sort == "index":
        # CUDA reads the number an entry begins with, as C does: "1gpu" is 1.
        number = re.match(r"\+?\d+", entry)
        index = int(number[0]) if number else len(gpus)
        return gpus[index] if index < len(gpus) else None
    among = gpus if sort == "GPU-" else [part for gpu in gpus for part in gpu.instances]
    begun = [gpu for gpu in among if gpu.uuid.startswith(entry)]
    return begun[0] if len(begun) == 1 else None


def _read(nvml: Nvml, handle: Any) -> NvmlGpu:
    total, free = _memory(nvml, handle)
    parts = _instances(nvml, handle)
    return NvmlGpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total=total,
        memory_free=free,
        mig_mode=parts is not None,
        instances=parts or (),
    )


def _memory(nvml: Nvml, handle: Any) -> tuple[int | None, int | None]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None, None  # GPUs that share the memory of the CPU have none of their own
    return int(memory.total), int(memory.free)


def _instances(nvml: Nvml, handle: Any) -> tuple[NvmlGpu, ...] | None:
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return None  # a model without MIG
    parts: list[NvmlGpu] = []
    for index in range(count):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue  # an empty slot
        total, free = _memory(nvml, part)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(part)), _text(nvml.nvmlDeviceGetName(part))
        parts.append(NvmlGpu(uuid, name, total, free))
    return tuple(parts)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
