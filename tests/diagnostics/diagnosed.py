"""Provokes each cause in a copy of one process that has imported TensorFlow and started nothing.

Reads ``{name: {"environment": {...}, "code": "..."}}`` from standard input. The code runs in a copy
of the process with that environment; what it leaves in ``report`` is written as a line of JSON, or
what its last line raises, where ``raises`` is set.
GPUs are planted where TensorFlow and this library ask the driver for them, so that everything above
is real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

VARIABLES = ("CUDA_", "NVIDIA_", "TF_", "NCCL_", "KERAS_", "SLURM_", "TPU_", "COLAB_", "LD_LIBRARY")
GIB = 1024**3


def provoke(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns for each case its report as ``{"text": ..., "findings": [...], ...}``."""
    result = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cases),
        env=clean() | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"case"')]
    return {found["case"]: found for found in map(json.loads, lines)}


def clean() -> dict[str, str]:
    """The environment without what the cases are about."""
    return {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}


class FakeNvml:
    """The functions of ``pynvml`` that are used, over a list of GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: list[dict[str, Any]], cuda: int = 12080, broken: str = "") -> None:
        self.gpus, self.cuda, self.broken = gpus, cuda, broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(self.broken)

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.10"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: Any) -> str:
        return gpu.get("name", "NVIDIA H200")

    def nvmlDeviceGetUUID(self, gpu: Any) -> str:
        return gpu["uuid"]

    def nvmlDeviceGetMemoryInfo(self, gpu: Any) -> Any:
        return SimpleNamespace(total=gpu.get("total", 80 * GIB), free=gpu.get("free", 79 * GIB))

    def nvmlDeviceGetMigMode(self, gpu: Any) -> tuple[int, int]:
        if "parts" not in gpu:
            raise self.NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Any) -> int:
        return len(gpu["parts"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Any, index: int) -> Any:
        return gpu["parts"][index]


def driver(count: int, cuda: int = 12080, broken: str = "", **settings: Any) -> None:
    """Plants a driver that sees so many GPUs; ``settings`` are those of the last."""
    gpus: list[dict[str, Any]] = [{"uuid": f"GPU-{i:08d}"} for i in range(count)]
    if gpus:
        gpus[-1].update(settings)
    sys.modules["pynvml"] = FakeNvml(gpus, cuda, broken)  # type: ignore[assignment]


def tensorflow_sees(count: int, names: list[str] | None = None) -> None:
    """Plants so many GPUs where TensorFlow lists those of the driver."""
    from tensorflow.python.eager.context import pywrap_tfe

    names = names or ["NVIDIA H200"] * count
    pywrap_tfe.TF_ListPhysicalDevices = lambda: [
        b"/physical_device:CPU:0",
        *[b"/physical_device:GPU:%d" % index for index in range(count)],
    ]
    pywrap_tfe.TF_GetDeviceDetails = lambda index: (
        {"device_name": names[index - 1], "compute_capability": "9.0"} if index else {}
    )


def virtual_cpus(count: int) -> None:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(cpu, parts)


def _in_a_copy(name: str, case: Mapping[str, Any]) -> None:
    os.environ.update(case.get("environment", {}))
    import keras
    import numpy as np
    import tensorflow as tf

    import tfmultigpu as tmg
    from tfmultigpu.addons import diagnostics
    from tfmultigpu.strategies.factory import devices_started

    names: dict[str, Any] = {**globals(), "tf": tf, "keras": keras, "np": np, "tmg": tmg}
    names["diagnostics"] = diagnostics
    sys.modules["pynvml"] = None  # type: ignore[assignment]  # Not installed, unless planted.
    if case.get("raises"):
        print(json.dumps({"case": name, **_raised(case["code"], names)}), flush=True)
        return
    exec(case.get("code", ""), names)
    before = devices_started()
    report = names.get("report") or diagnostics.doctor(**case.get("options", {}))
    found = {
        "case": name,
        **json.loads(report.as_json()),
        "text": str(report),
        "started_by_it": devices_started() and not before,
    }
    print(json.dumps(found), flush=True)


def _raised(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """What the last line of a program raises."""
    *lines, last = code.rstrip().splitlines()
    exec("\n".join(lines), names)
    found: dict[str, Any] = {"type": "", "text": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(last, names)
        except Exception as error:
            found = {"type": type(error).__name__, "text": str(error)}
    return {**found, "kept": names.get("kept", lambda: "")()}


def main() -> None:
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    import tfmultigpu.addons.diagnostics  # noqa: F401

    failed = False
    for name, case in json.load(sys.stdin).items():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _in_a_copy(name, case)
                status = 0
            except BaseException:
                print(f"in the case {name}:", file=sys.stderr)
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        failed |= bool(os.waitpid(child, 0)[1])
    sys.exit(failed)


if __name__ == "__main__":
    main()
