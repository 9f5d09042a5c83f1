"""Settings of the devices and of the environment that waste memory or time; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tfmultigpu.devices.names import listed
from tfmultigpu.diagnostics.machine import Machine
from tfmultigpu.diagnostics.report import Finding

__all__ = ["setting_findings"]

_ALLOCATORS = ("cuda_malloc_async", "default", "")
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs then exchange gradients through the memory of the CPU",
    "NCCL_SHM_DISABLE": "GPUs without a direct link then exchange gradients over the network stack",
    "NCCL_IB_DISABLE": "workers then exchange gradients over ordinary network sockets",
}


def setting_findings(machine: Machine) -> Iterator[Finding]:
    """What is wrong with memory growth, limits, what is taken, and variables."""
    yield from _growth(machine)
    yield from _memory(machine)
    yield from _variables(machine)


def _growth(machine: Machine) -> Iterator[Finding]:
    if len(set(machine.growth.values())) > 1:
        off = [name for name, grows in machine.growth.items() if not grows]
        yield Finding(
            "error",
            "growth-differs",
            f"Memory growth is on for some GPUs and off for {listed(off)}.",
            "TensorFlow fails at the first operation: memory growth cannot differ between GPUs.",
            "Call tmg.enable_memory_growth() in place of set_memory_growth for one GPU.",
        )
    forced = machine.environment.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
    if machine.limits and any(machine.growth.values()) and not forced:
        yield Finding(
            "warning",
            "growth-dropped",
            f"Memory growth is on, and {listed(tuple(machine.limits))} is split or limited: "
            "TensorFlow then drops memory growth of every GPU without a message.",
            "TensorFlow takes all memory of the GPUs after all.",
            "Remove one of the two, or set TF_FORCE_GPU_ALLOW_GROWTH=true",
        )
    for name, parts in machine.limits.items():
        if name.startswith("GPU") and parts > 1:
            yield Finding(
                "warning",
                "gpu-split",
                f"{name} is split into {parts} logical GPUs, which are one physical GPU.",
                "Replicas on them share its time: a test of the program, not faster.",
                f"Remove split_device({name!r}, ...) or set_logical_device_configuration",
            )


def _memory(machine: Machine) -> Iterator[Finding]:
    names = {device.name: device for device in machine.gpus}
    if not machine.started:
        for name in machine.visible:
            device = names.get(name)
            if device is None or not device.memory_total or device.memory_free is None:
                continue
            if device.memory_free < 0.5 * device.memory_total:
                yield Finding(
                    "warning",
                    "gpu-taken",
                    f"{name} ({device.description}) has {_gib(device.memory_free)} of "
                    f"{_gib(device.memory_total)} free: another program uses it.",
                    "All replicas run out of memory together with the fullest one.",
                    "End the other program (nvidia-smi names it), or use the rest: "
                    f"tmg.devices.restrict_devices([...]) without {name!r}",
                )
    models = Counter(gpu.description for gpu in machine.used_gpus if gpu.description)
    if len(models) > 1:
        yield Finding(
            "note",
            "unequal-gpus",
            "The GPUs differ: "
            + ", ".join(f"{count} x {model}" for model, count in models.items())
            + ".",
            "With equal shares every step waits for the slowest, which looks like idle GPUs.",
            "tmg.distribute_dataset(dataset, strategy, shares=tmg.plan_shares(batch_size, "
            "tmg.measured_capacities(step, batch)))",
        )
    if machine.gpus and not machine.driver.has_package:
        yield Finding(
            "note",
            "no-nvml",
            "The extra nvml is not installed, so the memory of the GPUs is not known to TensorFlow "
            "programs without starting them.",
            "Shares by memory, and the memory in this report, need it.",
            "pip install 'tfmultigpu[nvml]'",
        )


def _variables(machine: Machine) -> Iterator[Finding]:
    growth = machine.environment.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if growth is not None and growth not in ("true", "false"):
        yield Finding(
            "warning",
            "growth-variable",
            "TF_FORCE_GPU_ALLOW_GROWTH is neither 'true' nor 'false', the only values that "
            "TensorFlow understands.",
            "TensorFlow ignores it, with a line in its log, and goes by what the program set.",
            "TF_FORCE_GPU_ALLOW_GROWTH=true",
        )
    allocator = machine.environment.get("TF_GPU_ALLOCATOR")
    if allocator is not None and allocator not in _ALLOCATORS:
        yield Finding(
            "warning",
            "allocator-variable",
            "TF_GPU_ALLOCATOR is set to something that TensorFlow does not know.",
            "TensorFlow ignores it, with a line in its log.",
            "TF_GPU_ALLOCATOR=cuda_malloc_async, or unset it",
        )
    for name, effect in _SLOW.items():
        if machine.environment.get(name, "0") not in ("0", ""):
            yield Finding(
                "note",
                "nccl-variable",
                f"{name} is set: {effect}.",
                "The sum of the gradients may take most of a step.",
                f"unset {name}, unless NCCL fails without it",
            )


def _gib(number: int) -> str:
    return f"{number / 1024**3:.1f} GiB"
