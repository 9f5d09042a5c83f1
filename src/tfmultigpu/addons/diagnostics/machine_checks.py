"""Causes why a machine trains on one GPU or none: one function each, listed in ``CHECKS``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tfmultigpu.addons.diagnostics.machine import Machine
from tfmultigpu.addons.diagnostics.report import Finding, redact, shown_value
from tfmultigpu.devices.names import listed
from tfmultigpu.errors import TfMultiGpuError
from tfmultigpu.strategies.factory import known_schedulers

_INSTALL = "pip install --upgrade 'tensorflow[and-cuda]'"
_FOLDERS = "import glob, nvidia; print(*glob.glob(nvidia.__path__[0] + '/*/lib'), sep=':')"
_NO_GPUS = ("", "-1", "NoDevFiles", "none", "void")


def find_causes(machine: Machine) -> list[Finding]:
    """Returns the findings about a machine; pure."""
    findings: list[Finding] = []
    for check in CHECKS:
        findings.extend(check(machine))
    return findings or [_nothing_wrong(machine)]


def _count_shown(machine: Machine) -> int:
    """Returns how many GPUs of the driver CUDA shows to this process.

    For a value of ``CUDA_VISIBLE_DEVICES`` CUDA stops at the first entry that names no GPU. It
    shows no GPU if one is named twice, and one instance of MIG at most.
    """
    value, total = machine.environment.get("CUDA_VISIBLE_DEVICES"), len(machine.driver.gpus)
    count = total
    if value is not None:
        entries = value.replace(" ", "").split(",")
        if len(set(entries)) < len(entries):
            return 0
        count = 0
        for entry in entries:
            is_number = entry.isdecimal() and int(entry) < total
            if not is_number and not entry.startswith(("GPU-", "MIG-")):
                break
            count += 1

    if machine.driver.instances or "MIG-" in (value or ""):
        return min(count, 1)
    return count


def _keras_backend(machine: Machine) -> Iterator[Finding]:
    if machine.backend != "tensorflow":
        what = f"Keras runs on the backend {shown_value(machine.backend)}, not on TensorFlow."
        change = 'os.environ["KERAS_BACKEND"] = "tensorflow", before the first import of keras'
    elif machine.distribution is not None:
        what = f"keras.distribution is set to {machine.distribution}, which is for JAX."
        change = "strategy = tmg.create_strategy(), and the model under with strategy.scope():"
    else:
        return
    why = "Strategies of TensorFlow do nothing for such models: one device trains, or none."
    yield Finding("error", "keras-backend", what, why, change)


def _legacy_keras(machine: Machine) -> Iterator[Finding]:
    if machine.environment.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True"):  # As TensorFlow.
        what = "TF_USE_LEGACY_KERAS is set, so tf.keras is tf_keras, which is Keras 2."
        why = "This library trains models of Keras 3 and refuses objects of tf_keras."
        change = "import keras, in place of tf.keras; or unset TF_USE_LEGACY_KERAS before Python "
        change += "starts"
        yield Finding("warning", "keras-legacy", what, why, change)


def _no_driver(machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    if driver.cards and not driver.gpus:
        problem = redact(driver.problem, machine.environment)
        what = f"{driver.cards} NVIDIA card(s) are here, and no driver answers ({problem})."
        why = "Without the driver no program can use the GPUs, and TensorFlow takes the CPU."
        change = "Install the driver: nvidia-smi must list the GPUs. For a container: docker run "
        change += "--gpus all ... (Kubernetes: nvidia.com/gpu limits; Slurm: --gres=gpu:N)"
        yield Finding("error", "no-driver", what, why, change)


def _no_libraries(machine: Machine) -> Iterator[Finding]:
    driver, shown = machine.driver, _count_shown(machine)
    if machine.gpus or not shown:
        return
    built = re.match(r"\d+", machine.cuda or "")
    if machine.cuda is None:
        problem = "it is built without GPU support"
        change = f"pip uninstall tensorflow-cpu; {_INSTALL} (on Linux or WSL2)"
    elif built and driver.cuda and driver.cuda[0] < int(built[0]):
        problem = f"it is built for CUDA {built[0]}, and the driver runs CUDA {driver.cuda[0]}"
        change = f"Install a driver for CUDA {built[0]}, or a TensorFlow for CUDA {driver.cuda[0]}"
    else:
        problem = f"it does not find all libraries of CUDA {machine.cuda}"
        change = f'{_INSTALL}; then export LD_LIBRARY_PATH=$(python -c "{_FOLDERS}")'
    what = f"The driver shows {shown} GPU(s), and TensorFlow sees none: {problem}."
    why = "TensorFlow drops all GPUs, with one line in its log, and trains on the CPU."
    yield Finding("error", "no-libraries", what, why, change)


def _no_kernels(machine: Machine) -> Iterator[Finding]:
    built = []
    for number in re.findall(r"_(\d+)", " ".join(machine.kernels)):
        built.append(divmod(int(number), 10))
    if not built:
        return
    why = "It compiles its kernels at the first step, for up to half an hour, or fails with "
    why += "CUDA_ERROR_INVALID_PTX or CUDA_ERROR_INVALID_HANDLE."
    for gpu in machine.used_gpus:
        major, minor = gpu.compute_capability or built[0]
        if not any(major == other and minor >= least for other, least in built):
            what = f"{gpu.name} ({gpu.description}) has compute capability {major}.{minor}, and "
            what += f"this TensorFlow is built for {listed(machine.kernels)}."
            change = f"{_INSTALL}; or NVIDIA's container of TensorFlow"
            yield Finding("error", "no-kernels", what, why, change)


def _gpus_hidden(machine: Machine) -> Iterator[Finding]:
    value = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if value is None or ("MIG-" in value and machine.driver.instances):
        return
    seen, shown, total = len(machine.gpus), _count_shown(machine), len(machine.driver.gpus)
    variable, none = f"CUDA_VISIBLE_DEVICES={shown_value(value)}", value.strip() in _NO_GPUS
    most = shown  # That TensorFlow could see if it had read the variable.
    if not total:
        most = 0 if none else value.count(",") + 1
    severity = "warning"
    if seen > most:
        what = f"{variable} came too late: TensorFlow had listed {seen} GPUs before it was set."
        why = "TensorFlow reads the variable once, when it lists the first device."
        change = "Set it in the shell, or before import tensorflow"
    elif none or shown < total:
        if shown <= 1:
            severity = "error" if total or machine.driver.cards else "note"
        gpus = "none"
        if total:
            gpus = f"{shown} of {total} GPU(s)"
        what = f"{variable} shows TensorFlow {gpus}."
        why = "What it leaves out is idle, without a message. CUDA stops at the first entry that "
        why += "names no GPU, and shows none if one is named twice."
        change = "unset CUDA_VISIBLE_DEVICES, before Python starts"
        if total:
            change += f", or CUDA_VISIBLE_DEVICES={','.join(map(str, range(total)))}"
    else:
        return
    yield Finding(severity, "gpus-hidden", what, why, change)


def _gpus_hidden_by_program(machine: Machine) -> Iterator[Finding]:
    used, seen, shown = len(machine.used_gpus), len(machine.gpus), _count_shown(machine)
    if used < seen:
        hidden = listed([gpu.name for gpu in machine.gpus if gpu not in machine.used_gpus])
        what = f"{used} of {seen} GPUs are used: the program hides {hidden}."
        why = "Hidden GPUs are idle, and TensorFlow renumbers the others from GPU:0."
        change = "Remove tf.config.set_visible_devices(...)"
    elif 0 < seen < shown:
        what = f"The driver shows {shown} GPUs ({listed(machine.driver.gpus)}), TensorFlow {seen}."
        why = "TensorFlow leaves out GPUs that have far fewer multiprocessors than the others."
        change = "TF_MIN_GPU_MULTIPROCESSOR_COUNT=4 in the environment; and give them small shares"
    else:
        return
    severity = "warning"
    if used < seen and used <= 1:
        severity = "error"
    yield Finding(severity, "gpus-hidden-by-program", what, why, change)


def _cluster(machine: Machine) -> Iterator[Finding]:
    plan, environ = machine.plan, machine.environment
    named = [scheduler.described_by(environ) for scheduler in known_schedulers()]
    if environ.get("TPU_NAME"):
        named.append("TPU_NAME")
    described = [name for name in named if name]
    change = f"Start every worker as the scheduler does, or train alone: unset {listed(described)}"
    problems, severity = [], "error"
    if isinstance(plan, TfMultiGpuError):
        raised = f"create_strategy() would raise {type(plan).__name__}"
        problems = [f"{raised}: {plan.what} {plan.write}".rstrip()]
    elif plan is not None and plan.kind == "multi_worker" and machine.started:
        problems = ["A cluster is described, and TensorFlow started before it joined."]
        change = "tmg.create_strategy() directly after the imports"
    elif plan is not None:
        for name in described:
            kind = "multi_worker"
            if "TPU" in name:
                kind = "tpu"
            if kind != plan.kind:
                problems.append(f"{name} is set and not used: {plan.rejected[kind]}.")
        severity = "warning"
    why = "Other devices of the job wait, are idle, or train the same model by themselves."
    for what in problems:
        yield Finding(severity, "cluster", redact(what, environ), why, change)


def _gpu_taken(machine: Machine) -> Iterator[Finding]:
    if machine.started:
        return
    for gpu in machine.used_gpus:
        free, total = gpu.memory_free, gpu.memory_total or 0
        if free is not None and free < total / 2:
            what = f"Of {gpu.name} ({gpu.description}) {free / 1024**3:.1f} GiB are free: another "
            what += "program has more than half of its memory."
            why = "The fullest GPU limits the batch of all replicas."
            change = "End that program: nvidia-smi names it; or tmg.create_strategy(devices=[...])"
            yield Finding("warning", "gpu-taken", what, why, change)


def _instances(machine: Machine) -> Iterator[Finding]:
    count = machine.driver.instances
    if count > 1:
        what = f"The driver has {count} instances of MIG, and a process sees one of them."
        why = "A program in one process trains on one instance; the others are idle."
        change = "A worker for each: CUDA_VISIBLE_DEVICES=MIG-...,MIG-... python -m tfmultigpu "
        change += f"launch --workers {count} program.py, all names of nvidia-smi -L; in it "
        change += 'tmg.create_strategy(communication="ring"), for NCCL takes a GPU once'
        yield Finding("warning", "mig-instances", what, why, change)


def _small_shared_memory(machine: Machine) -> Iterator[Finding]:
    size = machine.shared_memory
    if size is not None and size < 1024**3 and len(machine.used_gpus) > 1:
        what = f"/dev/shm has {size / 1024**2:.0f} MiB, for {len(machine.used_gpus)} GPUs."
        why = "NCCL hands gradients over there. If it is full, the process dies of SIGBUS, exit "
        why += "code 135, or NCCL reports an unhandled system error."
        change = "docker run --shm-size=1g ... (Kubernetes: an emptyDir with medium: Memory at "
        change += "/dev/shm)"
        yield Finding("warning", "small-shared-memory", what, why, change)


def _wsl(machine: Machine) -> Iterator[Finding]:
    count = len(machine.used_gpus)
    if machine.wsl and count > 1 and "NCCL_P2P_DISABLE" not in machine.environment:
        what = f"{count} GPUs are used under WSL2, where GPUs cannot copy to each other directly."
        why = "NCCL may hang or fail there at the first step."
        change = "python -m tfmultigpu doctor --links tests it; NCCL_P2P_DISABLE=1 in the "
        change += 'environment, or tmg.create_strategy(communication="hierarchical_copy")'
        yield Finding("warning", "wsl2", what, why, change)


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    *(_keras_backend, _legacy_keras, _no_driver, _no_libraries, _no_kernels),
    *(_gpus_hidden, _gpus_hidden_by_program, _instances, _cluster, _gpu_taken),
    *(_small_shared_memory, _wsl),
)


def _nothing_wrong(machine: Machine) -> Finding:
    used = len(machine.used_gpus)
    if used > 1:
        why = "If a program uses one of them, the cause is in the program, often a wrong scope."
        change = "print(tmg.explain(model, optimizer, dataset, strategy)) in that program"
        return Finding("note", "ask-explain", f"This machine can use its {used} GPUs.", why, change)
    code, gpus = "no-gpu", "no GPU"
    if used:
        code, gpus = "one-gpu", "one GPU"
    what = f"The driver, the bus and TensorFlow have {gpus}."
    why = "There is nothing to distribute."
    change = "Nothing; to try several replicas: tmg.split_device('CPU:0', parts=4)"
    return Finding("note", code, what, why, change)
