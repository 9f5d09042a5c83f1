"""What the NVIDIA driver sees, and whether there is one: asked without starting a GPU."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfmultigpu.devices.nvml import NvmlGpu, read_gpus

__all__ = ["Driver", "ask_driver"]

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # The PCI class of graphics and 3D controllers.
_QUERY = "uuid,name,memory.total,memory.free,driver_version"
_MIB = 1024**2


@dataclass(frozen=True)
class Driver:
    """What is known of the driver.

    Attributes:
        version: Of the driver, such as ``"550.54.15"``; None where there is none.
        cuda: The newest CUDA it can run, such as ``(12, 4)``; None where it is not known.
        gpus: The GPUs it sees, in the order of the bus.
        source: Who said so: ``"nvml"``, ``"nvidia-smi"``, ``"/proc"`` or ``""``.
        has_package: Whether the extra ``nvml`` is installed.
        problem: What the driver answered instead; empty where it answered.
        cards: NVIDIA cards on the PCI bus, driver or not.
        files: GPUs whose device file (``/dev/nvidia0``) this process can see; None where there is
            no such folder to look into.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[NvmlGpu, ...] = ()
    source: str = ""
    has_package: bool = False
    problem: str = ""
    cards: int = 0
    files: int | None = None

    @property
    def unreachable(self) -> bool:
        """Whether there is a driver whose GPUs this process cannot open, as in a container."""
        return self.source == "/proc" and self.files == 0


def ask_driver(root: Path = Path("/")) -> Driver:
    """Ask NVML, else ``nvidia-smi``, else the files of the driver; starts no GPU.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are.

    Example:
        >>> ask_driver().cards >= 0
        True
    """
    cards, files = _cards(root), _device_files(root)
    nvml, has_package = _package()
    problem = ""
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            problem = str(error)
        else:
            try:
                version = nvml.nvmlSystemGetDriverVersion()
                version = version.decode() if isinstance(version, bytes) else str(version)
                number = int(nvml.nvmlSystemGetCudaDriverVersion())
                cuda = (number // 1000, number % 1000 // 10)
                gpus = read_gpus(nvml)
                return Driver(version, cuda, gpus, "nvml", True, "", cards, files)
            except nvml.NVMLError as error:
                problem = str(error)
            finally:
                nvml.nvmlShutdown()
    version, gpus, said = _nvidia_smi()
    if version is not None:
        return Driver(version, None, gpus, "nvidia-smi", has_package, "", cards, files)
    version, gpus = _files(root)
    source = "/proc" if version is not None else ""
    return Driver(version, None, gpus, source, has_package, problem or said, cards, files)


def _package() -> tuple[Any, bool]:
    try:
        return importlib.import_module("pynvml"), True
    except ImportError:
        return None, False


def _nvidia_smi() -> tuple[str | None, tuple[NvmlGpu, ...], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, (), "nvidia-smi is not there"
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, (), f"nvidia-smi: {type(error).__name__}"
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 5]
    if result.returncode or not rows:
        said = (result.stdout or result.stderr).strip().splitlines()
        return None, (), f"nvidia-smi: {said[0] if said else f'exit {result.returncode}'}"
    gpus = tuple(NvmlGpu(row[0], row[1], _bytes(row[2]), _bytes(row[3])) for row in rows)
    return rows[0][4], gpus, ""


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None


def _files(root: Path) -> tuple[str | None, tuple[NvmlGpu, ...]]:
    folder = root / "proc" / "driver" / "nvidia"
    try:
        text = (folder / "version").read_text()
    except OSError:
        return None, ()
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    gpus = []
    for path in sorted(folder.glob("gpus/*/information")):
        entries = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        named = {key.strip(): value.strip() for key, value in entries.items()}
        gpus.append(NvmlGpu(named.get("GPU UUID", ""), named.get("Model", "")))
    return match[1] if match else "unknown", tuple(gpus)


def _cards(root: Path) -> int:
    found = 0
    for device in (root / "sys" / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found


def _device_files(root: Path) -> int | None:
    folder = root / "dev"
    if not folder.is_dir():
        return None
    return len([path for path in folder.glob("nvidia*") if path.name[6:].isdecimal()])
