"""``doctor``: a report on this machine, with the line to change."""

from __future__ import annotations

from tfmultigpu.addons.diagnostics.machine import Machine, inspect_machine
from tfmultigpu.addons.diagnostics.machine_checks import find_causes
from tfmultigpu.addons.diagnostics.planned import OfPlan, findings_of
from tfmultigpu.addons.diagnostics.report import Report, describe_variables, redact, shown_value
from tfmultigpu.devices.discovery import Device


def doctor(plan: OfPlan | None = None) -> Report:
    """Reports why TensorFlow uses one GPU or none here, and which line to change.

    Starts no device and changes nothing. Leaves out addresses and paths, so that you can paste the
    report into an issue. Connects once to an address in ``TPU_NAME``, for four seconds at most.
    ``python -m tfmultigpu doctor`` prints the report.

    Args:
        plan: What ``plan_memory(step, batch)`` returned: then the report also says that the step
            will run out of memory, and which copies an option saves.

    Returns:
        The report: findings, the most serious first, then versions, devices, variables and the
        strategy that ``create_strategy()`` would create.

    Example:
        >>> report = doctor()
        >>> print(str(report).splitlines()[0])  # doctest: +ELLIPSIS
        tfmultigpu doctor: ...
    """
    return report_on(inspect_machine(), plan)


def report_on(machine: Machine, plan: OfPlan | None = None) -> Report:
    """Returns the report on a machine; pure."""
    driver, environ = machine.driver, machine.environment
    kernels = f"CUDA {machine.cuda}, for {', '.join(machine.kernels) or 'unknown GPUs'}"
    if machine.cuda is None:
        kernels = "no GPU support"
    cuda = ""
    if driver.cuda is not None:
        cuda = f", for CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    facts = {
        "versions": {
            **machine.versions,
            "keras backend": shown_value(machine.backend),
            "tensorflow built with": kernels,
            "NVIDIA driver": (driver.version or redact(driver.problem, environ)) + cuda,
        },
        "devices": {
            "NVIDIA cards": f"{driver.cards} on the bus",
            "GPUs of the driver": ", ".join(driver.gpus) or "none",
            "/dev/shm": _mebibytes(machine.shared_memory),
            **{device.name: _describe(device, machine) for device in machine.devices},
        },
        "variables": describe_variables(environ),
        "create_strategy()": _lines_of_plan(machine),
    }
    most = max(len(driver.gpus), len(machine.gpus), driver.cards)
    title = f"tfmultigpu doctor: {len(machine.used_gpus)} of {most} GPU(s) in use by TensorFlow"
    return Report(title, (*find_causes(machine), *findings_of(plan)), facts)


def _lines_of_plan(machine: Machine) -> dict[str, str]:
    planned = str(machine.plan)
    if isinstance(machine.plan, Exception):
        planned = "an error, see above"
    lines = {}
    for number, line in enumerate(planned.splitlines(), 1):
        lines[f"{number}."] = redact(line.strip(), machine.environment)
    return lines


def _mebibytes(size: int | None) -> str:
    return "none" if size is None else f"{size / 1024**2:.0f} MiB"


def _describe(device: Device, machine: Machine) -> str:
    facts = [device.description or "here"]
    if device.compute_capability:
        facts.append("compute capability " + ".".join(map(str, device.compute_capability)))
    if device.memory_total and device.memory_free is not None:
        free, total = device.memory_free / 1024**3, device.memory_total / 1024**3
        facts.append(f"{free:.1f} of {total:.1f} GiB free")
    if device.kind == "GPU":
        growth = {None: "hidden", True: "memory growth on", False: "memory growth off"}
        facts.append(growth[machine.growth.get(device.name)])
    return ", ".join(facts)
