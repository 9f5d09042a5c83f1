"""Causes in device settings and environment variables that waste memory or time: one function each.

To add a cause, write a function from a ``Machine`` to findings and name it in ``SETTINGS_CHECKS``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from tfmultigpu.addons.diagnostics.machine import Machine
from tfmultigpu.addons.diagnostics.report import Finding
from tfmultigpu.devices.names import listed

__all__ = ["SETTINGS_CHECKS"]

_FORCE_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_ALLOCATORS = ("cuda_malloc_async", "default", "")
_SLOW_NCCL = {
    "NCCL_P2P_DISABLE": "GPUs then exchange gradients through the memory of the CPU",
    "NCCL_SHM_DISABLE": "GPUs without a direct link then exchange gradients over the network stack",
    "NCCL_IB_DISABLE": "workers then exchange gradients over ordinary network sockets",
}


def _growth_differs(machine: Machine) -> Iterator[Finding]:
    if len(set(machine.growth.values())) > 1:
        off = [name for name, grows in machine.growth.items() if not grows]
        yield Finding(
            "error",
            "growth-differs",
            f"Memory growth is on for some GPUs and off for {listed(off)}.",
            "TensorFlow fails at the first operation: memory growth cannot differ between GPUs.",
            "Call tmg.enable_memory_growth() in place of set_memory_growth for one GPU.",
        )


def _growth_dropped(machine: Machine) -> Iterator[Finding]:
    forced = machine.environment.get(_FORCE_GROWTH) == "true"
    if machine.limits and any(machine.growth.values()) and not forced:
        yield Finding(
            "warning",
            "growth-dropped",
            f"Memory growth is on, and {listed(tuple(machine.limits))} is split or limited: "
            "TensorFlow then drops memory growth of every GPU without a message.",
            "TensorFlow takes all memory of the GPUs.",
            f"Remove one of the two, or set {_FORCE_GROWTH}=true",
        )


def _gpu_split(machine: Machine) -> Iterator[Finding]:
    for name, parts in machine.limits.items():
        if name.startswith("GPU") and parts > 1:
            yield Finding(
                "warning",
                "gpu-split",
                f"{name} is split into {parts} logical GPUs, which are one physical GPU.",
                "Replicas on them share its time: this tests a program and makes nothing faster.",
                f"Remove split_device({name!r}, ...) or set_logical_device_configuration",
            )


def _gpu_taken(machine: Machine) -> Iterator[Finding]:
    if machine.started:
        return
    for device in machine.used_gpus:
        if not device.memory_total or device.memory_free is None:
            continue
        if device.memory_free < 0.5 * device.memory_total:
            yield Finding(
                "warning",
                "gpu-taken",
                f"{device.name} ({device.description}) has {_gib(device.memory_free)} of "
                f"{_gib(device.memory_total)} free: another program uses it.",
                "The fullest GPU limits the batch of all replicas.",
                "End the other program (nvidia-smi names it), or use the rest: "
                f"tf.config.set_visible_devices([...], \"GPU\") without {device.name!r}",
            )


def _unequal_gpus(machine: Machine) -> Iterator[Finding]:
    models = Counter(gpu.description for gpu in machine.used_gpus if gpu.description)
    if len(models) > 1:
        counts = ", ".join(f"{count} x {model}" for model, count in models.items())
        yield Finding(
            "note",
            "unequal-gpus",
            f"The GPUs differ: {counts}.",
            "With equal shares every step waits for the slowest, which looks like idle GPUs.",
            "tmg.distribute_dataset(dataset, strategy, shares=tmg.plan_shares(batch_size, "
            "tmg.measured_capacities(step, batch)))",
        )


def _no_nvml(machine: Machine) -> Iterator[Finding]:
    if machine.gpus and not machine.driver.has_package:
        yield Finding(
            "note",
            "no-nvml",
            "The extra nvml is not installed, so the memory of the GPUs is unknown until "
            "TensorFlow starts them.",
            "Shares by memory, and the memory in this report, need it.",
            'pip install "tfmultigpu[nvml]"',
        )


def _growth_variable(machine: Machine) -> Iterator[Finding]:
    if machine.environment.get(_FORCE_GROWTH) not in (None, "true", "false"):
        yield Finding(
            "warning",
            "growth-variable",
            f"{_FORCE_GROWTH} is neither 'true' nor 'false', the only values that TensorFlow "
            "understands.",
            "TensorFlow ignores it, with a line in its log, and uses the setting of the program.",
            f"{_FORCE_GROWTH}=true",
        )


def _allocator_variable(machine: Machine) -> Iterator[Finding]:
    allocator = machine.environment.get("TF_GPU_ALLOCATOR")
    if allocator is not None and allocator not in _ALLOCATORS:
        yield Finding(
            "warning",
            "allocator-variable",
            "TF_GPU_ALLOCATOR has a value that TensorFlow does not know.",
            "TensorFlow ignores it, with a line in its log.",
            "TF_GPU_ALLOCATOR=cuda_malloc_async, or unset it",
        )


def _nccl_variable(machine: Machine) -> Iterator[Finding]:
    for name, effect in _SLOW_NCCL.items():
        if machine.environment.get(name, "0") not in ("0", ""):
            yield Finding(
                "note",
                "nccl-variable",
                f"{name} is set: {effect}.",
                "The all-reduce of the gradients may take most of a step.",
                f"unset {name}, unless NCCL fails without it",
            )


SETTINGS_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _growth_differs,
    _growth_dropped,
    _gpu_split,
    _gpu_taken,
    _unequal_gpus,
    _no_nvml,
    _growth_variable,
    _allocator_variable,
    _nccl_variable,
)


def _gib(number: int) -> str:
    return f"{number / 1024**3:.1f} GiB"
