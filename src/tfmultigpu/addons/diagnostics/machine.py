"""Facts about this machine and this process, collected without starting a device."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfmultigpu._version import __version__
from tfmultigpu.addons.diagnostics.driver import Driver, ask_driver
from tfmultigpu.devices import Device, list_devices, logical_to_physical
from tfmultigpu.devices.names import parse_device_name
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.factory import devices_started, plan_strategy
from tfmultigpu.strategies.plan import StrategyPlan

__all__ = ["Machine", "inspect_machine"]

# TensorFlow lists a GPU only if it can load all of these.
_LIBRARIES = ("cublas", "cudart", "cudnn", "cufft", "cusolver", "cusparse")
_PACKAGES = {
    "cublas": "nvidia-cublas",
    "cudart": "nvidia-cuda-runtime",
    "cudnn": "nvidia-cudnn",
    "cufft": "nvidia-cufft",
    "cusolver": "nvidia-cusolver",
    "cusparse": "nvidia-cusparse",
    "nccl": "nvidia-nccl",
}
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")


@dataclass(frozen=True)
class Machine:
    """The facts that findings about a machine depend on.

    Attributes:
        versions: Versions by package.
        driver: Facts about the NVIDIA driver.
        environment: The environment variables.
        gpu_build: This TensorFlow is built for GPUs.
        cuda_built: The CUDA version it was built against, such as ``"12.5"``; None without CUDA.
        cudnn_built: The cuDNN version it was built against.
        libraries: Version of each CUDA library; None if it was not found.
        devices: The physical devices that TensorFlow sees.
        visible: Names of those it uses.
        logical: Physical devices by logical device.
        growth: Memory growth, on or off, of each visible GPU.
        limits: Number of parts of each physical device that is split or limited.
        started: TensorFlow has started its devices.
        joined: TensorFlow has started them as part of a cluster.
        backend: The Keras backend.
        backend_source: The setting that chose the backend.
        keras_distribution: The class of the active ``keras.distribution``, if any.
        plan: The plan of ``create_strategy()``; None if it would raise.
        plan_problem: The error that ``create_strategy()`` would raise.
    """

    versions: Mapping[str, str]
    driver: Driver = field(default_factory=Driver)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_build: bool = True
    cuda_built: str | None = None
    cudnn_built: str | None = None
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    visible: tuple[str, ...] = ()
    logical: Mapping[str, str] = field(default_factory=dict)
    growth: Mapping[str, bool] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    started: bool = False
    joined: bool = False
    backend: str = "tensorflow"
    backend_source: str = "the default"
    keras_distribution: str | None = None
    plan: StrategyPlan | None = None
    plan_problem: TfMultiGpuError | None = None

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The GPUs that TensorFlow sees, including hidden ones."""
        return tuple(device for device in self.devices if device.kind == "GPU")

    @property
    def used_gpus(self) -> tuple[Device, ...]:
        """The GPUs that TensorFlow uses or will use."""
        return tuple(device for device in self.gpus if device.name in self.visible)


def inspect_machine() -> Machine:
    """Collects the facts; starts no device and does not import Keras."""
    config: Any = tf.config
    test: Any = tf.test
    sysconfig: Any = tf.sysconfig
    build = sysconfig.get_build_info()
    physical = {parse_device_name(one.name): one for one in config.list_physical_devices()}
    visible = tuple(parse_device_name(one.name) for one in config.get_visible_devices())
    parts = {
        name: len(config.get_logical_device_configuration(one) or ())
        for name, one in physical.items()
    }
    backend, source = _backend()
    started = devices_started()
    plan, problem = None, None
    try:
        plan = plan_strategy()
    except TfMultiGpuError as error:
        problem = error
    return Machine(
        versions=_versions(),
        driver=ask_driver(),
        environment=dict(os.environ),
        gpu_build=bool(test.is_built_with_gpu_support()),
        cuda_built=build.get("cuda_version"),
        cudnn_built=build.get("cudnn_version"),
        libraries=find_libraries(os.environ),
        devices=list_devices(),
        visible=visible,
        logical=logical_to_physical(),
        growth={
            name: bool(config.experimental.get_memory_growth(one))
            for name, one in physical.items()
            if name in visible and name.startswith("GPU")
        },
        limits={name: count for name, count in parts.items() if count},
        started=started,
        joined=started and _in_a_cluster(config.list_logical_devices("CPU")[0].name),
        backend=backend,
        backend_source=source,
        keras_distribution=keras_distribution(),
        plan=plan,
        plan_problem=problem,
    )


def _in_a_cluster(device: str) -> bool:
    return "/job:" in device and "/job:localhost" not in device


def keras_distribution() -> str | None:
    """Returns the class of the active ``keras.distribution``; None without one."""
    if "keras" not in sys.modules:
        return None
    import keras

    found = keras.distribution.distribution()
    return None if found is None else type(found).__name__


def find_libraries(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the version of each CUDA library; None if it is not installed.

    Searches Python's packages, then the usual folders; loads nothing.
    """
    packages: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if name.startswith("nvidia-"):
            packages[re.sub(r"-cu\d+$", "", name)] = distribution.version
    folders = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    folders += [*Path("/usr/local").glob("cuda*/lib64"), *map(Path, _FOLDERS)]
    found: dict[str, str | None] = {}
    for library in (*_LIBRARIES, "nccl"):
        version = packages.get(_PACKAGES[library])
        if version is None:
            files = [file for one in folders for file in one.glob(f"lib{library}.so.*")]
            names = sorted((file.name for file in files), key=len)
            version = names[-1].split(".so.", 1)[1] if names else None
        found[library] = version
    return found


def missing_libraries(libraries: Mapping[str, str | None], cuda: str | None) -> list[str]:
    """Returns the missing libraries that TensorFlow needs to list a GPU.

    Args:
        libraries: The result of ``find_libraries``.
        cuda: The CUDA version that TensorFlow is built against; another major version counts as
            missing.
    """
    missing = [name for name in _LIBRARIES if name in libraries and libraries[name] is None]
    major = (cuda or "").split(".")[0]
    here = libraries.get("cudart")
    if major and here is not None and here.split(".")[0] != major:
        missing.append(f"cudart {major} (found: {here})")
    return missing


def _backend() -> tuple[str, str]:
    """Returns the Keras backend and the setting that chose it; does not import Keras."""
    if "keras" in sys.modules:
        import keras

        return keras.config.backend(), "keras.config.backend()"
    asked = os.environ.get("KERAS_BACKEND")
    if asked:
        return asked, "KERAS_BACKEND"
    home = os.environ.get("KERAS_HOME")
    file = (Path(home) if home else Path.home() / ".keras") / "keras.json"
    try:
        chosen = json.loads(file.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        chosen = None
    return (str(chosen), "keras.json") if chosen else ("tensorflow", "the default")


def _versions() -> dict[str, str]:
    versions = {"tfmultigpu": __version__, "tensorflow": tf.__version__}
    for package in ("keras", "tf_keras", "numpy", "nvidia-ml-py"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    versions["python"] = platform.python_version()
    versions["system"] = f"{platform.system()} {platform.machine()}"
    return versions
