"""GPU memory from the NVIDIA driver, matched to the GPUs of TensorFlow.

TensorFlow must start a GPU to know its memory. The driver knows it through NVML (the package
`nvidia-ml-py`, extra `nvml`). NVML numbers all GPUs of the machine by PCI bus. TensorFlow sees the
GPUs that CUDA shows to this process, in CUDA's order. If the two cannot be matched with certainty,
the memory is unknown, because the number of another GPU would be wrong.
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
    """A GPU of the driver, or a MIG instance of one.

    Attributes:
        uuid: `"GPU-..."` or `"MIG-..."`.
        name: The model, such as `"NVIDIA A100-SXM4-80GB"`.
        memory_total: Bytes; `None` if the driver does not know them.
        memory_free: Bytes that no process has taken; `None` if the driver does not know them.
        mig_mode: The GPU is divided into MIG instances; CUDA then uses one of those.
        instances: The MIG instances.
    """

    uuid: str
    name: str
    memory_total: int | None = None
    memory_free: int | None = None
    mig_mode: bool = False
    instances: tuple[NvmlGpu, ...] = ()


class Nvml(Protocol):
    """The functions of the module `pynvml` that this library uses."""

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
    """Asks the driver for all GPUs of the machine, in PCI order; creates no CUDA context.

    Args:
        nvml: The module `pynvml`, or one like it; imported if not given.

    Returns:
        The GPUs; empty without the package, without a driver, or if one GPU does not answer.

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
        return tuple(_read_gpu(nvml, handle) for handle in handles)
    except nvml.NVMLError:
        # Leaving out the GPU that does not answer would renumber those after it.
        return ()
    finally:
        nvml.nvmlShutdown()


def visible_gpus(gpus: Sequence[NvmlGpu], asked: str | None) -> tuple[NvmlGpu, ...]:
    """Returns the GPUs that CUDA shows for a value of `CUDA_VISIBLE_DEVICES`, in that order.

    CUDA stops at the first entry that does not name a GPU, such as `-1`. It also stops at an entry
    of another form than the first one (index, `GPU-`, `MIG-`). CUDA shows no GPU if an entry
    appears twice. Of several MIG instances it uses the first.

    Args:
        gpus: All GPUs of the machine, in the order of their indices.
        asked: The value of `CUDA_VISIBLE_DEVICES`; `None` if it is not set.

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
    form = _entry_form(entries[0])
    chosen: list[NvmlGpu] = []
    for entry in entries:
        gpu = _find_gpu(entry, gpus) if _entry_form(entry) == form else None
        if gpu is None:
            break
        if gpu in chosen:
            return ()
        chosen.append(gpu)
    return tuple(chosen[:1] if form == "MIG-" else chosen)


def match_gpus(
    models: Sequence[str | None], gpus: Sequence[NvmlGpu], environment: Mapping[str, str]
) -> tuple[NvmlGpu | None, ...]:
    """Finds the driver's GPU for each GPU of TensorFlow; `None` if it is not certain.

    CUDA numbers equal GPUs by PCI bus, as NVML does. It numbers different models by speed, which
    NVML does not know, unless `CUDA_DEVICE_ORDER=PCI_BUS_ID`.

    Args:
        models: TensorFlow's description of GPU:0, GPU:1, ...; `None` if it has none.
        gpus: All GPUs of the machine, from `read_gpus`.
        environment: The environment variables that the process started with.

    Returns:
        One entry for each of `models`.

    Example:
        >>> two = (NvmlGpu("GPU-aa", "Tesla T4"), NvmlGpu("GPU-bb", "NVIDIA A100"))
        >>> [gpu and gpu.uuid for gpu in match_gpus(["NVIDIA A100", "Tesla T4"], two, {})]
        ['GPU-bb', 'GPU-aa']
    """
    unknown: tuple[None, ...] = (None,) * len(models)
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    by_uuid = asked is not None and _entry_form(asked.split(",")[0].strip()) != "index"
    if any(gpu.mig_mode for gpu in (visible_gpus(gpus, asked) if by_uuid else gpus)):
        return unknown
    equal = len({gpu.name for gpu in gpus}) <= 1
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not (by_uuid or by_bus or equal):
        return _match_by_model(models, gpus, renumbered=asked is not None)
    # TensorFlow leaves out GPUs that are too small or too old, always all of one model.
    shown = [
        gpu for gpu in visible_gpus(gpus, asked) if any(_same_model(model, gpu) for model in models)
    ]
    if len(shown) != len(models) or not all(map(_same_model, models, shown)):
        return unknown
    return tuple(shown)


def _match_by_model(
    models: Sequence[str | None], gpus: Sequence[NvmlGpu], *, renumbered: bool
) -> tuple[NvmlGpu | None, ...]:
    found: list[NvmlGpu | None] = []
    for position, model in enumerate(models):
        alike = [gpu for gpu in gpus if model is not None and _same_model(model, gpu)]
        certain = len(alike) == models.count(model) and (len(alike) == 1 or not renumbered)
        found.append(alike[models[:position].count(model)] if certain else None)
    return tuple(found)


def _same_model(model: str | None, gpu: NvmlGpu) -> bool:
    def plain(name: str) -> str:
        return name.lower().removeprefix("nvidia ").strip()

    return model is None or plain(model) == plain(gpu.name)


def _entry_form(entry: str) -> str:
    return next((prefix for prefix in ("GPU-", "MIG-") if entry.startswith(prefix)), "index")


def _find_gpu(entry: str, gpus: Sequence[NvmlGpu]) -> NvmlGpu | None:
    form = _entry_form(entry)
    if form == "index":
        # CUDA reads the leading number of an entry, as C does: "1gpu" is 1.
        number = re.match(r"\+?\d+", entry)
        index = int(number[0]) if number else len(gpus)
        return gpus[index] if index < len(gpus) else None
    candidates = gpus if form == "GPU-" else [part for gpu in gpus for part in gpu.instances]
    matches = [gpu for gpu in candidates if gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _read_gpu(nvml: Nvml, handle: Any) -> NvmlGpu:
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
        return None, None  # GPUs that share the memory of the CPU
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
