"""``doctor``: a report on this machine, with the line to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfmultigpu.addons.diagnostics.environment import describe_variables, redact
from tfmultigpu.addons.diagnostics.machine import Machine, inspect_machine
from tfmultigpu.addons.diagnostics.machine_checks import find_causes
from tfmultigpu.addons.diagnostics.report import SEVERITIES, Finding, Report, ordered
from tfmultigpu.devices.discovery import Device

__all__ = ["doctor"]

_UNKNOWN = "not known"


def doctor(*, show_addresses: bool = False) -> Report:
    """Reports why TensorFlow uses one GPU or none here, and which line to change.

    Starts no device and changes nothing. Leaves out addresses and paths, so that you can paste the
    report into an issue. Dials an address in ``TPU_NAME`` once, for four seconds at most.
    ``python -m tfmultigpu doctor`` prints the report.

    Args:
        show_addresses: Show TF_CONFIG and the address of a TPU unchanged.

    Returns:
        The report: findings, the most serious first, then versions, devices, variables and the
        strategy that ``create_strategy()`` would create.

    Example:
        >>> report = doctor()
        >>> print(str(report).splitlines()[0])  # doctest: +ELLIPSIS
        tfmultigpu doctor: ...
    """
    return report_on(inspect_machine(), show_addresses=show_addresses)


def report_on(machine: Machine, *, show_addresses: bool = False) -> Report:
    """Returns the report on a machine; pure."""
    secrets = {} if show_addresses else machine.environment
    facts = {
        "versions": {**machine.versions, **_cuda_versions(machine)},
        "devices": _device_facts(machine),
        "environment": describe_variables(machine.environment, addresses=show_addresses)
        or {"variables": "none of those that matter is set"},
        "strategy": _strategy_facts(machine, secrets),
    }
    used, seen = len(machine.used_gpus), max(len(machine.driver.gpus), len(machine.gpus))
    seen = max(seen, machine.driver.cards)
    title = f"tfmultigpu doctor: {used} of {seen} GPU(s) in use by TensorFlow"
    findings = ordered(find_causes(machine))
    return Report(title, findings, facts, _values(machine, secrets, findings))


def _values(
    machine: Machine, secrets: Mapping[str, str], findings: Sequence[Finding]
) -> dict[str, Any]:
    """Returns the facts as values of JSON; bytes for memory, None for what is not known."""
    driver = machine.driver
    installed = {
        name: None if version == "not installed" else version
        for name, version in machine.versions.items()
    }
    return {
        "findings": {one: sum(f.severity == one for f in findings) for one in SEVERITIES},
        "versions": installed,
        "keras_backend": machine.backend,
        "built_for_gpus": machine.gpu_build,
        "cuda_built": machine.cuda_built,
        "cudnn_built": machine.cudnn_built,
        "libraries": dict(machine.libraries),
        "driver": {
            "version": driver.version,
            "cuda": None if driver.cuda is None else list(driver.cuda),
            "gpus": [
                {
                    "name": gpu.name,
                    "memory_total": gpu.memory_total,
                    "memory_free": gpu.memory_free,
                    "mig_instances": len(gpu.instances) if gpu.mig_mode else None,
                }
                for gpu in driver.gpus
            ],
            "cards": driver.cards,
        },
        "gpus_seen": len(machine.gpus),
        "gpus_used": len(machine.used_gpus),
        "devices_started": machine.started,
        "devices": [_device_values(device, machine) for device in machine.devices],
        "strategy": _strategy_values(machine, secrets),
    }


def _device_values(device: Device, machine: Machine) -> dict[str, Any]:
    capability = device.compute_capability
    return {
        "name": device.name,
        "kind": device.kind,
        "description": device.description or None,
        "compute_capability": None if capability is None else list(capability),
        "memory_total": device.memory_total,
        "memory_free": device.memory_free,
        "visible": device.name in machine.visible,
        "memory_growth": machine.growth.get(device.name),
        "logical": [name for name, owner in machine.logical.items() if owner == device.name],
    }


def _strategy_values(machine: Machine, secrets: Mapping[str, str]) -> dict[str, Any]:
    plan = machine.plan
    if plan is None:
        return {"kind": None, "error": redact(str(machine.plan_problem), secrets)}
    return {
        "kind": plan.kind,
        "error": None,
        "num_replicas": plan.num_replicas,
        "devices": [redact(name, secrets) for name in plan.devices],
        "communication": plan.communication,
    }


def _cuda_versions(machine: Machine) -> dict[str, str]:
    driver = machine.driver
    if driver.version is None:
        version = f"none ({driver.problem})" if driver.problem else "none"
    else:
        cuda = f", CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
        version = f"{driver.version} (by {driver.source}{cuda})"
    found = {name: version or "not found" for name, version in machine.libraries.items()}
    return {
        "keras backend": f"{machine.backend} ({machine.backend_source})",
        "built for GPUs": "yes" if machine.gpu_build else "no",
        "CUDA built against": machine.cuda_built or "none",
        "CUDA found": found.pop("cudart", _UNKNOWN),
        "cuDNN built against": machine.cudnn_built or "none",
        "cuDNN found": found.pop("cudnn", _UNKNOWN),
        "other libraries": ", ".join(f"{name} {one}" for name, one in found.items()) or _UNKNOWN,
        "NVIDIA driver": version,
    }


def _device_facts(machine: Machine) -> dict[str, str]:
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
        facts = [device.description] if device.description else []
        if device.compute_capability:
            facts.append("compute capability " + ".".join(map(str, device.compute_capability)))
        if device.kind == "GPU":
            facts.append(_memory(device.memory_total, device.memory_free))
            if device.name in machine.growth:
                facts.append(f"memory growth {'on' if machine.growth[device.name] else 'off'}")
        if device.name in machine.limits:
            facts.append("split or limited")
        facts.append(f"runs as {', '.join(parts)}" if parts else "hidden")
        found[device.name] = ", ".join(facts)
    return found


def _memory(total: int | None, free: int | None) -> str:
    if total is None:
        return "memory not known"
    text = f"{total / 1024**3:.1f} GiB"
    return text if free is None else f"{text} of which {free / 1024**3:.1f} free"


def _strategy_facts(machine: Machine, secrets: Mapping[str, str]) -> dict[str, str]:
    if machine.plan is None:
        return {"would be": redact(f"an error: {machine.plan_problem}", secrets)}
    plan = machine.plan
    facts = {
        "would be": f"{plan.kind}, {plan.num_replicas or 'unknown'} replica(s)",
        "devices": ", ".join(plan.devices),
        "because": plan.reason,
        "gradients by": f"{plan.communication}: {plan.communication_reason}",
        **{f"not {kind}": why for kind, why in plan.rejected.items()},
    }
    return {name: redact(text, secrets) for name, text in facts.items()}
