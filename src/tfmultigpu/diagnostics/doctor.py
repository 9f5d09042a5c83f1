"""``doctor``: what is wrong with this machine, and what to change."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from tfmultigpu.diagnostics.environment import concealed, describe_variables
from tfmultigpu.diagnostics.machine import Machine, look_around
from tfmultigpu.diagnostics.machine_checks import find_causes
from tfmultigpu.diagnostics.report import Report, ordered
from tfmultigpu.steps.verification import outcomes

__all__ = ["doctor"]

_UNKNOWN = "not known"


def doctor(*, show_addresses: bool = False) -> Report:
    """Say what TensorFlow and the driver see here, what is wrong, and which line to change.

    Starts no device and changes nothing. Addresses and paths are not shown unless asked for, so
    the text can be pasted into an issue. ``python -m tfmultigpu doctor`` prints it. An address in
    ``TPU_NAME`` is dialled once, for four seconds at most.

    Args:
        show_addresses: Show TF_CONFIG and the address of a TPU as they are.

    Returns:
        The report: findings, the most serious first, then versions, devices, variables and the
        strategy that would be created.

    Example:
        >>> report = doctor()
        >>> print(str(report).splitlines()[0])  # doctest: +ELLIPSIS
        tfmultigpu doctor: ...
    """
    report = report_on(look_around(), show_addresses=show_addresses)
    if verified := outcomes():
        counts = Counter(one.outcome for one in verified)
        said = {f"steps {outcome}": str(count) for outcome, count in sorted(counts.items())}
        report = dataclasses.replace(report, facts={**report.facts, "verification": said})
    return report


def report_on(machine: Machine, *, show_addresses: bool = False) -> Report:
    """Returns the report on a machine; pure."""
    secrets = {} if show_addresses else machine.environment
    facts = {
        "versions": {**machine.versions, **_cuda(machine)},
        "devices": _devices(machine),
        "environment": describe_variables(machine.environment, addresses=show_addresses)
        or {"variables": "none of those that matter is set"},
        "strategy": _strategy(machine, secrets),
    }
    used, seen = len(machine.used_gpus), max(len(machine.driver.gpus), len(machine.gpus))
    seen = max(seen, machine.driver.cards)
    title = f"tfmultigpu doctor: {used} of {seen} GPU(s) in use by TensorFlow"
    return Report(title, ordered(find_causes(machine)), facts)


def _cuda(machine: Machine) -> dict[str, str]:
    driver = machine.driver
    if driver.version is None:
        said = f"none ({driver.problem})" if driver.problem else "none"
    else:
        cuda = f", CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
        said = f"{driver.version} (by {driver.source}{cuda})"
    found = {name: version or "not found" for name, version in machine.libraries.items()}
    return {
        "keras backend": f"{machine.backend} ({machine.backend_source})",
        "built for GPUs": "yes" if machine.gpu_build else "no",
        "CUDA built against": machine.cuda_built or "none",
        "CUDA found": found.pop("cudart", _UNKNOWN),
        "cuDNN built against": machine.cudnn_built or "none",
        "cuDNN found": found.pop("cudnn", _UNKNOWN),
        "other libraries": ", ".join(f"{name} {one}" for name, one in found.items()) or _UNKNOWN,
        "NVIDIA driver": said,
    }


def _devices(machine: Machine) -> dict[str, str]:
    found = {
        "the bus": f"{machine.driver.cards} NVIDIA card(s)",
        "the driver": f"{len(machine.driver.gpus)} GPU(s)",
        "TensorFlow": f"{len(machine.gpus)} GPU(s), uses {len(machine.used_gpus)}",
        "devices started": "yes" if machine.started else "no",
    }
    for gpu in machine.driver.gpus:
        mode = f", {len(gpu.instances)} MIG instances" if gpu.mig_mode else ""
        memory = _memory(gpu.memory_total, gpu.memory_free)
        found[f"driver: {gpu.uuid[:12]}"] = f"{gpu.name}, {memory}{mode}"
    for device in machine.devices:
        parts = [name for name, owner in machine.logical.items() if owner == device.name]
        said = [device.description] if device.description else []
        if device.compute_capability:
            said.append("compute capability " + ".".join(map(str, device.compute_capability)))
        if device.kind == "GPU":
            said.append(_memory(device.memory_total, device.memory_free))
            if device.name in machine.growth:
                said.append(f"memory growth {'on' if machine.growth[device.name] else 'off'}")
        if device.name in machine.limits:
            said.append("split or limited")
        said.append(f"runs as {', '.join(parts)}" if parts else "hidden")
        found[device.name] = ", ".join(said)
    return found


def _memory(total: int | None, free: int | None) -> str:
    if total is None:
        return "memory not known"
    text = f"{total / 1024**3:.1f} GiB"
    return text if free is None else f"{text} of which {free / 1024**3:.1f} free"


def _strategy(machine: Machine, secrets: Mapping[str, str]) -> dict[str, str]:
    if machine.plan is None:
        return {"would be": concealed(f"an error: {machine.plan_problem}", secrets)}
    plan = machine.plan
    facts = {
        "would be": f"{plan.kind}, {plan.num_replicas or 'unknown'} replica(s)",
        "devices": ", ".join(plan.devices),
        "because": plan.reason,
        "gradients by": f"{plan.communication}: {plan.communication_reason}",
        **{f"not {kind}": why for kind, why in plan.rejected.items()},
    }
    return {name: concealed(text, secrets) for name, text in facts.items()}
