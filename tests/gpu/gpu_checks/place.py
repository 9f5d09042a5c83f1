"""Where the checks of a group run: parts of a real GPU, or virtual CPUs that rehearse them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Sequence

import tensorflow as tf

import tfmultigpu as tmg

GIB = 1024**3
NO_GPU = "needs a GPU that TensorFlow can see"


class NeedsGpu(Exception):
    """A check cannot run here; the text says what is missing."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What a check is given.

    Attributes:
        kind: ``"GPU"``, or ``"CPU"`` where it is a rehearsal on virtual CPUs.
        devices: The logical devices to use.
        limits: Bytes that each of them may take; empty where they grow. Virtual CPUs have none:
            there they are the numbers to calculate with.
        used_before: Bytes of the GPU that were taken before TensorFlow started; 0 in a rehearsal.
    """

    kind: str
    devices: tuple[str, ...]
    limits: tuple[int, ...] = ()
    used_before: int = 0

    @property
    def rehearsal(self) -> bool:
        """Whether this is a rehearsal on virtual CPUs."""
        return self.kind == "CPU"

    def need_gpu(self, what: str) -> None:
        """Raises NeedsGpu in a rehearsal."""
        if self.rehearsal:
            raise NeedsGpu(f"{NO_GPU}: {what}")

    def strategy(self) -> tf.distribute.Strategy:
        """Returns the strategy the library makes of these devices."""
        if len(self.devices) == 1:
            return tf.distribute.OneDeviceStrategy(f"/device:{self.devices[0]}")
        return tmg.create_strategy("mirrored", devices=list(self.devices), fallback=False)


def grown(kind: str) -> Place:
    """The whole GPU, whose memory is taken as it is needed."""
    used = _before(kind)
    tmg.enable_memory_growth()
    return Place(kind, (f"{kind}:0",), used_before=used)


def limited(kind: str, limit: int = 4 * GIB) -> Place:
    """The GPU with a limit."""
    used = _before(kind)
    if kind == "GPU":
        tmg.limit_memory({"GPU:0": limit})
    return Place(kind, (f"{kind}:0",), (limit,), used)


def split(kind: str, limits: Sequence[int]) -> Place:
    """The GPU in parts of these sizes."""
    used = _before(kind)
    memory = list(limits) if kind == "GPU" else None
    names = tmg.split_device(f"{kind}:0", parts=len(limits), memory=memory)
    return Place(kind, names, tuple(limits), used)


def used_memory() -> int:
    """Returns the bytes of the first visible GPU that all processes together have taken.

    Asked of ``nvidia-smi``, or of the driver's library where that program is missing: not of the
    library that is checked.

    Raises:
        NeedsGpu: Neither is here.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    command = [
        "nvidia-smi",
        "-i",
        first,
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
    ]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return int(said.stdout.split()[0]) * 1024**2
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        problem = f"nvidia-smi: {type(error).__name__}"
    try:
        import pynvml
    except ImportError:
        raise NeedsGpu(f"needs nvidia-smi or the package nvidia-ml-py ({problem})") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NeedsGpu(f"needs a driver that answers ({problem}, NVML: {error})") from None
    try:
        named = first.startswith("GPU-")
        by = pynvml.nvmlDeviceGetHandleByUUID if named else pynvml.nvmlDeviceGetHandleByIndex
        return int(pynvml.nvmlDeviceGetMemoryInfo(by(first if named else int(first))).used)
    except (pynvml.NVMLError, ValueError) as error:
        raise NeedsGpu(f"needs the memory of GPU {first} ({problem}, NVML: {error})") from None
    finally:
        pynvml.nvmlShutdown()


def _before(kind: str) -> int:
    if kind == "CPU":
        return 0
    try:
        used = used_memory()  # before TensorFlow is asked for anything
    finally:
        if not tmg.list_devices("GPU"):
            raise NeedsGpu(NO_GPU)
    return used
