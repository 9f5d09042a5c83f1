"""Facts about this machine and this process, collected without starting a device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfmultigpu._version import __version__
from tfmultigpu.addons.diagnostics.driver import Driver, ask_driver
from tfmultigpu.devices.configure import devices_started
from tfmultigpu.devices.discovery import Device, list_devices
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies import plan_strategy
from tfmultigpu.strategies.plan import StrategyPlan


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
    plan: StrategyPlan | TfMultiGpuError
    try:
        plan = plan_strategy()
    except TfMultiGpuError as error:
        plan = error
    return Machine(
        versions=_versions(),
        driver=driver,
        environment=dict(os.environ),
        cuda=str(build.get("cuda_version", "unknown")) if with_gpus else None,
        kernels=tuple(build.get("cuda_compute_capabilities", ())),
        devices=devices,
        growth={
            parse_device_name(gpu.name): bool(config.experimental.get_memory_growth(gpu))
            for gpu in config.get_visible_devices("GPU")
        },
        started=started and "/job:localhost" in config.list_logical_devices("CPU")[0].name,
        **_keras(),
        plan=plan,
    )


def _keras() -> dict[str, Any]:
    try:
        import keras
    except (ImportError, ValueError):  # It fails without its backend.
        return {"backend": os.environ.get("KERAS_BACKEND", "of keras.json")}
    active = keras.distribution.distribution()
    distribution = None if active is None else type(active).__name__
    return {"backend": str(keras.config.backend()), "distribution": distribution}


def _versions() -> dict[str, str]:
    installed = {
        str(one.metadata["Name"]).lower(): one.version for one in importlib.metadata.distributions()
    }
    nvidia = [f"{name} {installed[name]}" for name in sorted(installed) if "nvidia-" in name]
    return {
        "tfmultigpu": __version__,
        "tensorflow": tf.__version__,
        "keras": installed.get("keras", "not installed"),
        "numpy": installed.get("numpy", "not installed"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages of NVIDIA": ", ".join(nvidia) or "none",
    }
