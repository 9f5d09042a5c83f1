"""Devices are listed without starting them, and set before: all or none, never silently late."""

from __future__ import annotations

import pytest
from law import device_settings
from law.processes import pool

import tfmultigpu as tmg


# Fails if listing starts the devices (no split is possible afterwards), if a refused call changes
# something, or if a setting that comes too late is not told. One process: it starts but once.
def test_settings_before_and_after_tensorflow_started() -> None:
    pool().start().call(device_settings.hold)


# Fails if a device has no name that other calls accept, or another kind or number than its name.
def test_each_device_is_listed_once_with_its_facts() -> None:
    devices = tmg.list_devices()
    assert "CPU:0" in [device.name for device in devices]
    assert len({device.name for device in devices}) == len(devices)
    for device in devices:
        assert device.name == f"{device.kind}:{device.index}"
        assert isinstance(device.description, str)
        for size in (device.memory_total, device.memory_free):
            assert size is None or size > 0
    for kind in ("CPU", "GPU", "TPU"):
        listed = tmg.list_devices(kind)
        assert listed == tuple(device for device in devices if device.kind == kind)


# Fails if a device that does not exist is taken for another, or is not named beside what exists.
@pytest.mark.parametrize(
    ("call", "asked"),
    [
        (lambda: tmg.create_strategy(devices=["CPU:1", "CPU:64"]), "CPU:64"),
        (lambda: tmg.create_strategy(devices=["GPU:7"], fallback=True), "GPU:7"),
        (lambda: tmg.create_strategy(devices=64), "64"),
        (lambda: tmg.plan_strategy(devices=["TPU:3"]), "TPU:3"),
        (lambda: tmg.split_device("GPU:7", parts=2), "GPU:7"),
        (lambda: tmg.limit_memory({"GPU:7": 2**30}), "GPU:7"),
        (lambda: tmg.enable_memory_growth(["GPU:7"]), "GPU:7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "asked",
)
def test_a_device_that_does_not_exist(call: object, asked: str) -> None:
    assert callable(call)
    with pytest.raises(tmg.DeviceNotFoundError) as caught:
        call()
    assert asked in str(caught.value)
    if "CPU" in asked:
        assert "CPU:0" in str(caught.value)


# Fails if what TensorFlow has no memory limits for is accepted in silence.
def test_no_gpu_is_no_error_and_a_cpu_has_no_memory_limit() -> None:
    if not tmg.list_devices("GPU"):
        assert tmg.enable_memory_growth() == ()
    with pytest.raises(tmg.errors.TfMultiGpuError, match="CPU"):
        tmg.limit_memory({"CPU:0": 2**30})
    with pytest.raises(tmg.errors.TfMultiGpuError, match="CPU"):
        tmg.split_device("CPU:0", parts=8, memory=2**30)
