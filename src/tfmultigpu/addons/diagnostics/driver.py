"""Facts about the NVIDIA driver and its GPUs, read without starting a GPU."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tfmultigpu.devices.gpu_memory import read_gpus


@dataclass(frozen=True)
class Driver:
    """Facts about the driver; what is not known is empty, or None."""

    gpus: tuple[str, ...] = ()  # The models of its GPUs.
    version: str = ""
    cuda: tuple[int, int] | None = None  # The newest that it runs, such as (12, 4).
    problem: str = ""  # Why it does not answer.
    cards: int = 0  # NVIDIA's on the PCI bus, with or without a driver.


def ask_driver(root: Path = Path("/")) -> Driver:
    """Asks ``nvidia-smi``, or else NVML, which is the extra ``nvml``; starts no GPU."""
    cards = _count_cards(root)
    command = ["nvidia-smi", "-q", "-x"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        answer, problem = result.stdout, (result.stdout or result.stderr).partition("\n")[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, problem = "", type(error).__name__

    def values(tag: str) -> tuple[str, ...]:
        return tuple(re.findall(rf"<{tag}>([^<]*)</{tag}>", answer))

    gpus = values("product_name") or tuple(gpu.name for gpu in read_gpus())
    versions = re.findall(r"(\d+)\.(\d+)", " ".join(values("cuda_version")))
    cuda = [(int(major), int(minor)) for major, minor in versions]
    return Driver(
        gpus,
        version="".join(values("driver_version")),
        cuda=cuda[0] if cuda else None,
        problem="" if gpus else f"nvidia-smi: {problem}",
        cards=cards,
    )


def _count_cards(root: Path) -> int:
    """Counts the devices of NVIDIA that are graphics or 3D controllers."""
    folders = (root / "sys" / "bus" / "pci" / "devices").glob("*")
    files = [(folder / "vendor", folder / "class") for folder in folders]
    found = [tuple(one.read_text().strip() for one in pair if one.is_file()) for pair in files]
    return sum(pair[:1] == ("0x10de",) and pair[-1].startswith("0x03") for pair in found)
