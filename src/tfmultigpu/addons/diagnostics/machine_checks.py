"""Causes why a machine trains on one GPU or none: one function each, listed in ``CHECKS``.

To add a cause, write a function from a ``Machine`` to findings and name it in ``CHECKS``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tfmultigpu.addons.diagnostics.environment import redact, redact_devices
from tfmultigpu.addons.diagnostics.machine import Machine, missing_libraries
from tfmultigpu.addons.diagnostics.report import Finding
from tfmultigpu.addons.diagnostics.settings_checks import SETTINGS_CHECKS
from tfmultigpu.devices.names import listed
from tfmultigpu.devices.nvml import NvmlGpu, visible_gpus

__all__ = ["CHECKS", "find_causes"]

_INSTALL = "pip install 'tensorflow[and-cuda]'"
# What describes a cluster, and how to correct it.
_CLUSTERS = {
    "TF_CONFIG": "Correct TF_CONFIG, or train alone: unset TF_CONFIG",
    "SLURM_PROCID": "Start every task of the job with one srun: srun python train.py",
}
_NO_GPUS = ("", "-1", "NoDevFiles", "none", "void")


def find_causes(machine: Machine) -> list[Finding]:
    """Returns the findings about a machine, in the order of ``CHECKS``; pure.

    Example:
        >>> from tfmultigpu.addons.diagnostics.machine import Machine
        >>> [finding.code for finding in find_causes(Machine({}))]
        ['no-gpu']
    """
    found = [finding for check in CHECKS for finding in check(machine)]
    return [*found, *_nothing_wrong(machine, found)]


def _keras_backend(machine: Machine) -> Iterator[Finding]:
    if machine.backend != "tensorflow":
        shown = machine.backend if re.fullmatch(r"[a-z_]{1,20}", machine.backend) else "another"
        yield Finding(
            "error",
            "keras-backend",
            f"Keras runs on the {shown!r} backend (chosen by {machine.backend_source}), not on "
            "TensorFlow.",
            "tf.distribute strategies do nothing for models of another backend.",
            'Before the first import of keras: os.environ["KERAS_BACKEND"] = "tensorflow"',
        )


def _keras_distribution(machine: Machine) -> Iterator[Finding]:
    if machine.keras_distribution is not None:
        yield Finding(
            "error",
            "keras-distribution",
            f"keras.distribution is set to {machine.keras_distribution}, which does nothing on the "
            "TensorFlow backend: one device trains, without a message.",
            "Keras implements it for JAX. On TensorFlow one device holds the weights and computes "
            "everything.",
            "Remove keras.distribution.set_distribution(...) and write "
            "strategy = tmg.create_strategy(), then build under with strategy.scope():",
        )


def _legacy_keras(machine: Machine) -> Iterator[Finding]:
    if machine.environment.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        installed = machine.versions.get("tf_keras", "not installed") != "not installed"
        yield Finding(
            "warning",
            "legacy-keras",
            "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (the package tf_keras, which is "
            f"{'installed' if installed else 'not installed'}).",
            "This library needs models of Keras 3, and the two do not mix. Ray Train sets this "
            "variable by itself.",
            "Write import keras, never tf.keras; or unset TF_USE_LEGACY_KERAS.",
        )


def _no_driver(machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    if driver.cards and driver.version is None:
        yield Finding(
            "error",
            "no-driver",
            f"{driver.cards} NVIDIA card(s) are in this machine, but there is no NVIDIA driver"
            + (f" that answers ({driver.problem})." if driver.problem else "."),
            "Without the driver no program can use the GPUs. TensorFlow takes the CPU, without a "
            "message.",
            "Install the driver and restart; nvidia-smi must list the GPUs. In a virtual machine "
            "or WSL install it on the host.",
        )


def _no_device_files(machine: Machine) -> Iterator[Finding]:
    if machine.driver.unreachable and not machine.gpus:
        yield Finding(
            "error",
            "no-device-files",
            f"The driver {machine.driver.version} is here, but this process sees no GPU: there is "
            "no /dev/nvidia0.",
            "A container sees the driver's files, but no GPUs unless it is started with them.",
            "docker run --gpus all ... (Kubernetes: resources.limits nvidia.com/gpu; Slurm: "
            "--gres=gpu:N)",
        )


def _cpu_build(machine: Machine) -> Iterator[Finding]:
    if not machine.gpu_build and not machine.gpus:
        cards = max(machine.driver.cards, len(machine.driver.gpus))
        yield Finding(
            "error" if cards else "note",
            "cpu-build",
            f"This TensorFlow {machine.versions.get('tensorflow', '')} is built without GPU "
            f"support; NVIDIA GPUs in this machine: {cards}.",
            "The package tensorflow-cpu has no CUDA, nor has TensorFlow on macOS or on Windows "
            "outside WSL.",
            f"{_INSTALL} (on Linux or WSL2), after pip uninstall tensorflow-cpu",
        )


def _old_driver(machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    built = re.match(r"(\d+)", machine.cuda_built or "")
    if built and driver.cuda is not None and driver.cuda[0] < int(built[1]):
        yield Finding(
            "error",
            "old-driver",
            f"The driver {driver.version} runs CUDA {driver.cuda[0]}.{driver.cuda[1]} at most, and "
            f"this TensorFlow is built against CUDA {machine.cuda_built}.",
            "CUDA does not start on a driver of an older major version, so TensorFlow sees no GPU.",
            f"Install a driver for CUDA {built[1]} or newer, or a TensorFlow built against CUDA "
            f"{driver.cuda[0]}.",
        )


@dataclass(frozen=True)
class _CudaVisible:
    """The value of CUDA_VISIBLE_DEVICES, against the GPUs of the driver.

    Attributes:
        entries: The entries of the list.
        shown: The GPUs of the driver that CUDA shows.
        total: Number of the driver's GPUs.
        text: The assignment, for a report.
        of: Describes the driver's GPUs, for a report.
    """

    entries: tuple[str, ...]
    shown: tuple[NvmlGpu, ...]
    total: int
    text: str
    of: str

    @classmethod
    def read(cls, machine: Machine) -> _CudaVisible | None:
        """Reads the variable; None if it is not set."""
        value = machine.environment.get("CUDA_VISIBLE_DEVICES")
        if value is None:
            return None
        gpus = machine.driver.gpus
        return cls(
            entries=tuple(entry.strip() for entry in value.split(",")),
            shown=visible_gpus(gpus, value),
            total=len(gpus),
            text=f"CUDA_VISIBLE_DEVICES={redact_devices(value)}",
            of=f"of the {len(gpus)} GPU(s) that the driver sees" if gpus else "of the machine's",
        )

    @property
    def empty(self) -> bool:
        """True if the value names no GPU on purpose."""
        return len(self.entries) == 1 and self.entries[0] in _NO_GPUS

    @property
    def repeats(self) -> bool:
        """True if a GPU is named twice."""
        return any(count > 1 and entry for entry, count in Counter(self.entries).items())

    @property
    def all_indices(self) -> str:
        """The value that names every GPU of the driver."""
        return ",".join(str(index) for index in range(self.total))


def _all_gpus_hidden(machine: Machine) -> Iterator[Finding]:
    variable = _CudaVisible.read(machine)
    if variable is not None and variable.empty:
        yield Finding(
            "error" if variable.total or machine.driver.cards else "note",
            "gpus-hidden",
            f"{variable.text} hides every GPU from TensorFlow: it sees none {variable.of}.",
            "Training runs on the CPU, without a message.",
            "unset CUDA_VISIBLE_DEVICES, before Python starts",
        )


def _gpu_twice(machine: Machine) -> Iterator[Finding]:
    variable = _CudaVisible.read(machine)
    if variable is not None and variable.repeats:
        once = redact_devices(",".join(dict.fromkeys(variable.entries)))
        yield Finding(
            "error",
            "gpu-twice",
            f"{variable.text} names a GPU twice, and CUDA then shows none {variable.of}.",
            "Training runs on the CPU, without a message.",
            "CUDA_VISIBLE_DEVICES=" + once.strip("'"),
        )


def _gpu_list_cut(machine: Machine) -> Iterator[Finding]:
    variable = _CudaVisible.read(machine)
    if variable is None or variable.empty or variable.repeats or not variable.total:
        return
    if len(variable.shown) < len(variable.entries):
        yield Finding(
            "error" if len(variable.shown) <= 1 < variable.total else "warning",
            "gpu-list-cut",
            f"{variable.text} names {len(variable.entries)} GPUs, and CUDA shows "
            f"{len(variable.shown)} {variable.of}: it stops at the first entry that is not a GPU.",
            "The GPUs named after it are idle, without a message.",
            f"Name GPUs from 0 to {variable.total - 1}: "
            f"CUDA_VISIBLE_DEVICES={variable.all_indices}",
        )


def _some_gpus_hidden(machine: Machine) -> Iterator[Finding]:
    variable = _CudaVisible.read(machine)
    if variable is None or variable.empty or variable.repeats:
        return
    shown = len(variable.shown)
    if len(variable.entries) <= shown < variable.total:
        yield Finding(
            "error" if shown == 1 and len(machine.gpus) <= 1 else "warning",
            "gpus-hidden",
            f"{variable.text} shows TensorFlow {shown} {variable.of}.",
            "The others are idle. If a scheduler set the variable, they belong to other jobs.",
            "unset CUDA_VISIBLE_DEVICES, before Python starts, or name them all: "
            f"CUDA_VISIBLE_DEVICES={variable.all_indices}",
        )


def _shown_gpus(machine: Machine) -> tuple[NvmlGpu, ...]:
    """Returns the GPUs of the driver that CUDA shows to this process."""
    return visible_gpus(machine.driver.gpus, machine.environment.get("CUDA_VISIBLE_DEVICES"))


def _has_mig(machine: Machine) -> bool:
    return any(gpu.mig_mode for gpu in machine.driver.gpus)


def _mig(machine: Machine) -> Iterator[Finding]:
    gpus = machine.driver.gpus
    instances = sum(len(gpu.instances) for gpu in gpus)
    if _has_mig(machine) and len(_shown_gpus(machine)) <= 1 < len(gpus) + instances:
        yield Finding(
            "warning",
            "mig",
            f"A GPU is divided into {instances} MIG instances; CUDA shows one instance to a "
            "process.",
            "A process trains on one MIG instance, whatever their number.",
            "Start one process for each instance (TF_CONFIG), or have MIG switched off: "
            "nvidia-smi -mig 0",
        )


def _no_cuda_libraries(machine: Machine) -> Iterator[Finding]:
    shown = len(_shown_gpus(machine))
    if machine.gpus or not shown or not machine.gpu_build or machine.driver.unreachable:
        return
    missing = missing_libraries(machine.libraries, machine.cuda_built)
    libraries = f"not found: {listed(missing)}" if missing else "all found"
    yield Finding(
        "error",
        "no-cuda-libraries",
        f"The driver shows {shown} GPU(s), TensorFlow sees none. CUDA libraries {libraries}; "
        f"TensorFlow is built against CUDA {machine.cuda_built}, cuDNN {machine.cudnn_built}.",
        "If one library is missing or of another version, TensorFlow drops all GPUs, with "
        "one line in its log ('Cannot dlopen some GPU libraries').",
        f"{_INSTALL}, into this environment, and remove other CUDA folders from LD_LIBRARY_PATH",
    )


def _gpus_ignored(machine: Machine) -> Iterator[Finding]:
    shown = _shown_gpus(machine)
    if 0 < len(machine.gpus) < len(shown) and not _has_mig(machine):
        yield Finding(
            "warning",
            "gpus-ignored",
            f"The driver shows {len(shown)} GPUs, TensorFlow takes {len(machine.gpus)} of them: "
            f"{listed([gpu.name for gpu in shown])}.",
            "TensorFlow leaves out GPUs that it does not support, or that have far fewer "
            "multiprocessors than the others.",
            "To use the smaller ones too: TF_MIN_GPU_MULTIPROCESSOR_COUNT=4 in the environment, "
            "with shares=tmg.plan_shares(...) so that they do not hold up the rest.",
        )


def _variable_too_late(machine: Machine) -> Iterator[Finding]:
    variable = _CudaVisible.read(machine)
    if variable is None or not variable.total or _has_mig(machine):
        return
    if len(machine.gpus) > len(variable.shown):
        yield Finding(
            "warning",
            "variable-too-late",
            f"{variable.text} shows {len(variable.shown)} GPU(s), but TensorFlow sees "
            f"{len(machine.gpus)}: it was set after TensorFlow had listed the devices.",
            "TensorFlow reads the variable once, when it lists the first device.",
            "Set it before import tensorflow, or in the shell; or call "
            "tf.config.set_visible_devices instead.",
        )


def _gpus_hidden_by_program(machine: Machine) -> Iterator[Finding]:
    hidden = [gpu.name for gpu in machine.gpus if gpu.name not in machine.visible]
    if hidden:
        used = len(machine.used_gpus)
        yield Finding(
            "error" if used <= 1 else "warning",
            "gpus-hidden-by-program",
            f"{used} of {len(machine.gpus)} GPUs are used: the program hid {listed(hidden)} "
            "(tf.config.set_visible_devices).",
            "Hidden GPUs are idle, and TensorFlow renumbers the others from GPU:0.",
            "Remove the call of tf.config.set_visible_devices.",
        )


def _cluster(machine: Machine) -> Iterator[Finding]:
    if machine.plan_problem is not None:
        text = redact(str(machine.plan_problem), machine.environment).split(" Received:")[0]
        yield Finding(
            "error",
            "cluster",
            f"create_strategy() would raise {type(machine.plan_problem).__name__}: {text}",
            "TensorFlow itself would hang, or train on this machine alone without a message.",
            next(
                (fix for name, fix in _CLUSTERS.items() if name in machine.environment),
                "Start every worker as its scheduler does, or train alone",
            ),
        )


def _not_started_by_its_scheduler(machine: Machine) -> Iterator[Finding]:
    if machine.plan is None or machine.plan.cluster is not None:
        return
    tasks = machine.environment.get("SLURM_NTASKS", "1")
    if tasks != "1" and "SLURM_STEP_NUM_TASKS" not in machine.environment:
        yield Finding(
            "warning",
            "not-started-by-scheduler",
            f"The Slurm job has {tasks} tasks, but srun did not start this process, so it trains "
            "alone.",
            "The other tasks do not run, or each trains the same model by itself.",
            "srun python train.py",
        )


def _cluster_of_one(machine: Machine) -> Iterator[Finding]:
    plan = machine.plan
    if plan is None or plan.cluster is None or plan.kind == "multi_worker":
        return
    cluster = plan.cluster
    if len(cluster.workers) == 1 and cluster.index == 0:
        yield Finding(
            "warning",
            "cluster-of-one",
            f"{cluster.source} describes a cluster of one worker, so only this machine trains.",
            "Other machines of the job are idle, or train alone.",
            f"List every worker in {cluster.source}; for one machine unset "
            f"{listed(cluster.source.variables)}",
        )


def _started_before_cluster(machine: Machine) -> Iterator[Finding]:
    plan = machine.plan
    if plan is not None and plan.kind == "multi_worker" and machine.started and not machine.joined:
        source = "The environment" if plan.cluster is None else plan.cluster.source
        yield Finding(
            "error",
            "started-before-cluster",
            f"{source} describes a cluster, but TensorFlow has started its devices and can no "
            "longer join it.",
            "create_strategy() raises ClusterError, and the other workers wait.",
            "Move tmg.create_strategy() up, directly after the imports.",
        )


def _tpu_missing(machine: Machine) -> Iterator[Finding]:
    name = next((one for one in ("TPU_NAME", "COLAB_TPU_ADDR") if machine.environment.get(one)), "")
    reason = None if machine.plan is None else machine.plan.rejected.get("tpu")
    if name and reason is not None:
        yield Finding(
            "warning",
            "tpu-missing",
            f"{name} is set, but no TPU answers: {redact(reason, machine.environment)}.",
            "TensorFlow would wait minutes for it; create_strategy() takes the next best.",
            f"Correct the address, or unset {name}",
        )


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _keras_backend,
    _keras_distribution,
    _legacy_keras,
    _no_driver,
    _no_device_files,
    _cpu_build,
    _old_driver,
    _all_gpus_hidden,
    _gpu_twice,
    _gpu_list_cut,
    _some_gpus_hidden,
    _mig,
    _no_cuda_libraries,
    _gpus_ignored,
    _variable_too_late,
    _gpus_hidden_by_program,
    _cluster,
    _not_started_by_its_scheduler,
    _cluster_of_one,
    _started_before_cluster,
    _tpu_missing,
    *SETTINGS_CHECKS,
)


def _nothing_wrong(machine: Machine, found: list[Finding]) -> Iterator[Finding]:
    """Describes a machine on which no check found an error."""
    used = len(machine.used_gpus)
    if any(finding.severity == "error" for finding in found):
        return
    kind = None if machine.plan is None else machine.plan.kind
    if used > 1:
        yield Finding(
            "note",
            "ask-explain",
            f"This machine can use its {used} GPUs. If a program uses one of them, the cause is in "
            "the program.",
            "A model built outside the scope of the strategy trains on one device, without a "
            "message.",
            "print(tmg.explain(model, optimizer, dataset, strategy)) in that program",
        )
    elif used == 1 and kind != "multi_worker":
        yield Finding(
            "note",
            "one-gpu",
            f"{machine.used_gpus[0].name} is the only GPU here.",
            "There is nothing to distribute: create_strategy() takes this one.",
            "Nothing to change; to try several replicas: tmg.split_device('CPU:0', parts=4)",
        )
    elif used == 0 and kind not in ("multi_worker", "tpu"):
        codes = {finding.code for finding in found}
        if not codes & {"cpu-build", "gpus-hidden"}:
            yield Finding(
                "note",
                "no-gpu",
                "No GPU is here: TensorFlow and the NVIDIA driver see none, and the bus has no "
                "NVIDIA card.",
                "Training runs on the CPU.",
                "Run it on a machine with GPUs. If this is one, nvidia-smi must list them first.",
            )
