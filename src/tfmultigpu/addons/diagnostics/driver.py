"""Facts about the NVIDIA driver and its GPUs, read without starting a GPU."""

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
    """Facts about the driver.

    Attributes:
        version: Such as ``"550.54.15"``; None without a driver.
        cuda: The newest CUDA the driver can run, such as ``(12, 4)``; None if unknown.
        gpus: The GPUs of the driver, in PCI order.
        source: The source of these facts: ``"nvml"``, ``"nvidia-smi"``, ``"/proc"`` or ``""``.
        has_package: The extra ``nvml`` is installed.
        problem: The reason why the driver did not answer; empty if it did.
        cards: Number of NVIDIA cards on the PCI bus, with or without a driver.
        files: Number of GPU device files (``/dev/nvidia0``) that this process sees; None without
            a ``/dev``.
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
        """True if this process cannot open the driver's GPUs, as in a container without them."""
        return self.source == "/proc" and self.files == 0


def ask_driver(root: Path = Path("/")) -> Driver:
    """Asks NVML, else ``nvidia-smi``, else the driver's files in ``/proc``; starts no GPU.

    Args:
        root: The folder of ``proc``, ``sys`` and ``dev``.

    Example:
        >>> ask_driver().cards >= 0
        True
    """
    cards, files = _count_cards(root), _count_device_files(root)
    nvml, has_package = _import_pynvml()
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
    version, gpus, smi_problem = _ask_nvidia_smi()
    if version is not None:
        return Driver(version, None, gpus, "nvidia-smi", has_package, "", cards, files)
    version, gpus = _read_proc(root)
    source = "/proc" if version is not None else ""
    return Driver(version, None, gpus, source, has_package, problem or smi_problem, cards, files)


def _import_pynvml() -> tuple[Any, bool]:
    try:
        return importlib.import_module("pynvml"), True
    except ImportError:
        return None, False


def _ask_nvidia_smi() -> tuple[str | None, tuple[NvmlGpu, ...], str]:
    """Returns the driver's version, its GPUs, and the problem if there is one."""
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
        lines = (result.stdout or result.stderr).strip().splitlines()
        return None, (), f"nvidia-smi: {lines[0] if lines else f'exit {result.returncode}'}"
    gpus = tuple(NvmlGpu(row[0], row[1], _bytes(row[2]), _bytes(row[3])) for row in rows)
    return rows[0][4], gpus, ""


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else None


def _read_proc(root: Path) -> tuple[str | None, tuple[NvmlGpu, ...]]:
    folder = root / "proc" / "driver" / "nvidia"
    try:
        text = (folder / "version").read_text()
    except OSError:
        return None, ()
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    gpus = []
    for path in sorted(folder.glob("gpus/*/information")):
        entries = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in entries.items()}
        gpus.append(NvmlGpu(fields.get("GPU UUID", ""), fields.get("Model", "")))
    return match[1] if match else "unknown", tuple(gpus)


def _count_cards(root: Path) -> int:
    found = 0
    for device in (root / "sys" / "bus" / "pci" / "devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return found


def _count_device_files(root: Path) -> int | None:
    folder = root / "dev"
    if not folder.is_dir():
        return None
    return len([path for path in folder.glob("nvidia*") if path.name[6:].isdecimal()])
