"""The memory of each GPU is that of the right GPU, or unknown: no GPU is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tfmultigpu.devices.gpu_memory import NvmlGpu, match_gpus, read_gpus

GIB = 1024**3
H200, A100, T4 = "NVIDIA H200", "NVIDIA A100-SXM4-40GB", "Tesla T4"
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def shows(value: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": value}


def machine(models: list[str]) -> tuple[NvmlGpu, ...]:
    return tuple(NvmlGpu(f"GPU-{index}", model, GIB + index) for index, model in enumerate(models))


# TensorFlow's GPUs, the driver's in PCI order, the environment, and the numbers of those matched.
MATCHES: list[tuple[list[Any], list[str], dict[str, str], list[int] | None]] = [
    ([], [], {}, []),
    ([], [H200] * 2, shows(""), []),
    ([H200] * 8, [H200] * 8, {}, list(range(8))),
    ([H200] * 2, [H200] * 8, shows("5,2"), [5, 2]),
    ([H200] * 2, [H200] * 8, shows(" 5 , 2"), [5, 2]),
    ([H200] * 2, [H200] * 8, shows("GPU-7,GPU-1"), [7, 1]),
    ([A100], [T4, A100], shows("GPU-1"), [1]),
    ([T4, A100], [T4, A100], BY_BUS, [0, 1]),
    ([T4, A100], [A100, A100, T4], {**BY_BUS, **shows("2,1")}, [2, 1]),
    (["NVIDIA Tesla T4"], [T4], {}, [0]),  # Two spellings of one model.
    # TensorFlow sees another number than the environment says.
    ([H200] * 3, [H200] * 8, shows("5,2"), None),
    ([H200] * 1, [H200] * 8, shows("7,99"), None),
    ([H200] * 3, [H200] * 2, {}, None),
    ([H200] * 2, [], {}, None),
    # CUDA puts the fastest first, NVML counts by bus.
    ([A100, T4], [T4, A100], {}, None),
    ([A100, T4], [A100, T4], shows("0,1"), None),
    # The environment changed after CUDA had read it; one GPU was too small for TensorFlow.
    ([A100], [T4, A100], {**BY_BUS, **shows("0")}, None),
    ([A100, A100], ["NVIDIA T400", A100, A100], BY_BUS, None),
    # MIG, by UUID and by number; a device that TensorFlow does not describe.
    ([f"{A100} MIG 1g.5gb"], [A100], shows("MIG-1"), None),
    ([f"{A100} MIG 1g.5gb"], [A100], {}, None),
    ([None], [T4], {}, None),
]


@pytest.mark.parametrize(("models", "driver", "environment", "numbers"), MATCHES, ids=str)
def test_only_what_is_certain_is_matched(
    models: Any, driver: Any, environment: Any, numbers: Any
) -> None:
    gpus = machine(driver)
    matched = match_gpus(models, gpus, environment)
    wanted = [None] * len(models) if numbers is None else [gpus[i] for i in numbers]
    assert list(matched) == wanted, (models, driver, environment)


def nvml(gpus: list[tuple[Any, ...]], broken: str = "") -> Any:
    """The functions of ``pynvml`` that are used; a GPU is its UUID, model and memory."""

    class NVMLError(Exception):
        pass

    def handle(index: int) -> Any:
        if broken == "handle" and index == 1:
            raise NVMLError("GPU is lost")
        return gpus[index]

    def init() -> None:
        if broken == "driver":
            raise NVMLError("Library Not Found")
        module.open += 1

    def memory(gpu: Any) -> Any:
        if len(gpu) == 2:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=gpu[2], free=gpu[3])

    def shutdown() -> None:
        module.open -= 1

    module = SimpleNamespace(
        NVMLError=NVMLError,
        open=0,
        nvmlInit=init,
        nvmlShutdown=shutdown,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetUUID=lambda gpu: gpu[0],
        nvmlDeviceGetName=lambda gpu: gpu[1],
        nvmlDeviceGetMemoryInfo=memory,
    )
    return module


T4_AND_GB10: list[tuple[Any, ...]] = [("GPU-a", T4, 16 * GIB, 15 * GIB), ("GPU-b", "NVIDIA GB10")]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        # The second shares the memory of the CPU.
        (nvml(T4_AND_GB10), (NvmlGpu(*T4_AND_GB10[0]), NvmlGpu("GPU-b", "NVIDIA GB10"))),
        (nvml([]), ()),
        (nvml(T4_AND_GB10, broken="driver"), ()),
        (nvml(T4_AND_GB10, broken="handle"), ()),  # One silent GPU makes all unknown.
    ],
)
def test_the_driver_is_read_and_closed(
    module: Any, expected: tuple[NvmlGpu, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert read_gpus() == expected
    assert module.open == 0


def test_without_the_package_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # "import pynvml" fails.
    assert read_gpus() == ()
