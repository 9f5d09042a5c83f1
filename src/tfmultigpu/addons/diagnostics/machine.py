"""Facts about this machine and this process, collected without starting a device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu._version import __version__, version_of_keras
from tfmultigpu.devices.configure import devices_started
from tfmultigpu.devices.discovery import Device, list_devices
from tfmultigpu.devices.gpu_memory import read_gpus
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies import plan_strategy
from tfmultigpu.strategies.plan import StrategyPlan


@dataclass(frozen=True)
class Driver:
    """Facts about the NVIDIA driver; what is not known is empty, or None."""

    gpus: tuple[str, ...] = ()  # The models of its GPUs.
    version: str = ""
    cuda: tuple[int, int] | None = None  # The newest that it runs, such as (12, 4).
    problem: str = ""  # Why it does not answer.
    cards: int = 0  # NVIDIA's on the PCI bus, with or without a driver.
    instances: int = 0  # Of MIG, over all GPUs.


@dataclass(frozen=True)
class Machine:
    """The facts that findings about a machine depend on."""

    versions: Mapping[str, str] = field(default_factory=dict)  # By package.
    driver: Driver = field(default_factory=Driver)
    environment: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = "12.5"  # That TensorFlow was built against; None for a build without GPUs.
    kernels: tuple[str, ...] = ()  # What it was built for, such as ("sm_80", "compute_90").
    devices: tuple[Device, ...] = ()  # The physical devices that TensorFlow sees.
    growth: Mapping[str, bool] = field(default_factory=dict)  # Of each GPU that it will use.
    started: bool = False  # TensorFlow has started its devices, without a cluster.
    backend: str = "tensorflow"
    shared_memory: int | None = None  # The bytes of /dev/shm; None where there is none.
    wsl: bool = False  # Linux under Windows.
    distribution: str | None = None  # The class of the active ``keras.distribution``.
    plan: StrategyPlan | TfMultiGpuError | None = None  # Of ``create_strategy()``, or its error.

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs that TensorFlow sees, including hidden ones."""
        return tuple(device for device in self.devices if device.kind == "GPU")

    @property
    def used_gpus(self) -> tuple[Device, ...]:
        """The GPUs that TensorFlow uses or will use."""
        return tuple(device for device in self.gpus if device.name in self.growth)


def inspect_machine() -> Machine:
    """Collects the facts; starts no device."""
    tensorflow: Any = tf
    config, build = tensorflow.config, tensorflow.sysconfig.get_build_info()
    with_gpus = tensorflow.test.is_built_with_gpu_support()
    driver, devices, started = ask_driver(), list_devices(), devices_started()
    try:
        plan: StrategyPlan | TfMultiGpuError = plan_strategy()
    except TfMultiGpuError as error:
        plan = error
    growth = {}
    for gpu in config.get_visible_devices("GPU"):
        name = parse_device_name(gpu.name)
        growth[name] = bool(config.experimental.get_memory_growth(gpu))
    return Machine(
        versions=_versions(),
        driver=driver,
        environment=dict(os.environ),
        cuda=str(build.get("cuda_version", "unknown")) if with_gpus else None,
        kernels=tuple(build.get("cuda_compute_capabilities", ())),
        devices=devices,
        growth=growth,
        started=started and "/job:" not in config.list_logical_devices("CPU")[0].name,
        **_keras(),
        plan=plan,
        shared_memory=_size_of(Path("/dev/shm")),
        wsl="microsoft" in platform.release().lower(),
    )


def _size_of(folder: Path) -> int | None:
    """Returns the bytes of the file system of a folder; None if there is none."""
    try:
        system = os.statvfs(folder)
    except (OSError, AttributeError):  # Windows has neither.
        return None
    return system.f_frsize * system.f_blocks


def ask_driver(root: Path = Path("/")) -> Driver:
    """Asks ``nvidia-smi``, or else NVML, which is the extra ``nvml``; starts no GPU."""
    command = ["nvidia-smi", "-q", "-x"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        answer, problem = result.stdout, (result.stdout or result.stderr).partition("\n")[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, problem = "", type(error).__name__

    def values(tag: str) -> list[str]:
        return re.findall(rf"<{tag}>([^<]*)</{tag}>", answer)

    gpus = values("product_name") or [gpu.name for gpu in read_gpus()]
    problem = "" if gpus else f"nvidia-smi: {problem}"
    cuda = None
    if newest := re.search(r"(\d+)\.(\d+)", " ".join(values("cuda_version"))):
        cuda = int(newest[1]), int(newest[2])
    return Driver(
        tuple(gpus),
        version="".join(values("driver_version")),
        cuda=cuda,
        problem=problem,
        cards=sum(map(_is_nvidia_card, root.glob("sys/bus/pci/devices/*"))),
        instances=answer.count("<mig_device>"),
    )


def _is_nvidia_card(folder: Path) -> bool:
    vendor, kind = (folder / "vendor").read_text(), (folder / "class").read_text()
    return vendor.startswith("0x10de") and kind.startswith("0x03")  # Graphics or 3D controllers.


def _keras() -> dict[str, Any]:
    try:
        import keras
    except (ImportError, ValueError):  # It fails without its backend.
        return {"backend": os.environ.get("KERAS_BACKEND", "of keras.json")}
    active = keras.distribution.distribution()
    return {"backend": keras.config.backend(), "distribution": active and type(active).__name__}


def _versions() -> dict[str, str]:
    installed = {}
    for package in importlib.metadata.distributions():
        installed[str(package.metadata["Name"]).lower()] = package.version
    nvidia = []
    for name in sorted(installed):
        if "nvidia-" in name:
            nvidia.append(f"{name} {installed[name]}")
    return {
        "tfmultigpu": __version__,
        "tensorflow": tf.__version__,
        "keras": version_of_keras(),
        "numpy": installed.get("numpy", "not installed"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages of NVIDIA": ", ".join(nvidia) or "none",
    }
