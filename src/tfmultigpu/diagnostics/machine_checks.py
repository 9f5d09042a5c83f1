"""Why a machine trains on one GPU or none: a pure decision over what is known of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from tfmultigpu.clusters.sources import SOURCES
from tfmultigpu.devices.names import listed
from tfmultigpu.devices.nvml import visible_gpus
from tfmultigpu.diagnostics.environment import concealed, devices_shown
from tfmultigpu.diagnostics.machine import Machine, missing_libraries
from tfmultigpu.diagnostics.report import Finding
from tfmultigpu.diagnostics.settings_checks import setting_findings

__all__ = ["find_causes"]

_INSTALL = "pip install 'tensorflow[and-cuda]'"
_NONE = ("", "-1", "NoDevFiles", "none", "void")


def find_causes(machine: Machine) -> list[Finding]:
    """Return what is wrong with a machine, each part in the order in which one looks; pure.

    Example:
        >>> from tfmultigpu.diagnostics.machine import Machine
        >>> [finding.code for finding in find_causes(Machine({}))]
        ['no-gpu']
    """
    found = [
        *_keras(machine),
        *_hardware(machine),
        *_shown(machine),
        *_hidden(machine),
        *_cluster(machine),
        *_tpu(machine),
        *setting_findings(machine),
    ]
    found += _what_is_left(machine, found)
    return found


def _keras(machine: Machine) -> Iterator[Finding]:
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
    if machine.keras_distribution is not None:
        yield _distribution(machine.keras_distribution)
    if machine.environment.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        has = machine.versions.get("tf_keras", "not installed") != "not installed"
        yield Finding(
            "warning",
            "legacy-keras",
            "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2 (the package tf_keras, which is "
            f"{'installed' if has else 'not installed'}).",
            "Models of Keras 2 and Keras 3 do not mix, and this library takes those of Keras 3; "
            "Ray Train sets this variable by itself.",
            "Write import keras, never tf.keras; or unset TF_USE_LEGACY_KERAS.",
        )


def _distribution(kind: str) -> Finding:
    return Finding(
        "error",
        "keras-distribution",
        f"keras.distribution is set to {kind}, which does nothing on the TensorFlow backend: one "
        "device trains, without a message.",
        "Keras implements it for JAX; on TensorFlow the weights and all work are on one device.",
        "Remove keras.distribution.set_distribution(...) and write "
        "strategy = tmg.create_strategy(), then build under with strategy.scope():",
    )


def _hardware(machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    cards = max(driver.cards, len(driver.gpus))
    if driver.cards and driver.version is None:
        yield Finding(
            "error",
            "no-driver",
            f"{driver.cards} NVIDIA card(s) are in this machine, but there is no NVIDIA driver"
            + (f" that answers ({driver.problem})." if driver.problem else "."),
            "Without the driver no program can use the GPUs; TensorFlow says nothing and takes "
            "the CPU.",
            "Install the driver and restart; nvidia-smi must list the GPUs. In a virtual machine "
            "or WSL install it on the host.",
        )
    elif driver.unreachable and not machine.gpus:
        yield Finding(
            "error",
            "no-device-files",
            f"The driver {driver.version} is here, but no GPU is shown to this process: there is "
            "no /dev/nvidia0.",
            "A container has the driver's files without its GPUs unless it is started with them.",
            "docker run --gpus all ... (Kubernetes: resources.limits nvidia.com/gpu; Slurm: "
            "--gres=gpu:N)",
        )
    if not machine.gpu_build and not machine.gpus:
        yield Finding(
            "error" if cards else "note",
            "cpu-build",
            f"This TensorFlow {machine.versions.get('tensorflow', '')} is built without GPU "
            f"support; NVIDIA GPUs in this machine: {cards}.",
            "The package tensorflow-cpu, and TensorFlow on Windows (but for WSL) and macOS, have "
            "no CUDA in them.",
            f"{_INSTALL} (on Linux or WSL2), after pip uninstall tensorflow-cpu",
        )
    built = re.match(r"(\d+)", machine.cuda_built or "")
    if built and driver.cuda is not None and driver.cuda[0] < int(built[1]):
        yield Finding(
            "error",
            "old-driver",
            f"The driver {driver.version} runs CUDA {driver.cuda[0]}.{driver.cuda[1]} at most, and "
            f"this TensorFlow is built against CUDA {machine.cuda_built}.",
            "CUDA does not start with a driver of an older major version, so TensorFlow sees no "
            "GPU.",
            f"Install a driver for CUDA {built[1]} or newer, or a TensorFlow built against CUDA "
            f"{driver.cuda[0]}.",
        )


def _shown(machine: Machine) -> Iterator[Finding]:
    """What CUDA_VISIBLE_DEVICES and the libraries make of the driver's GPUs."""
    asked = machine.environment.get("CUDA_VISIBLE_DEVICES")
    all_gpus, seen = machine.driver.gpus, len(machine.gpus)
    shown = visible_gpus(all_gpus, asked)
    if asked is not None:
        yield from _variable(machine, asked, len(shown))
    cut = any(gpu.mig_mode for gpu in all_gpus)
    if cut and len(shown) <= 1 < len(all_gpus) + sum(len(gpu.instances) for gpu in all_gpus):
        yield Finding(
            "warning",
            "mig",
            f"A GPU is cut into {sum(len(gpu.instances) for gpu in all_gpus)} MIG instances; CUDA "
            "shows one instance to a process.",
            "However many instances there are, a process trains on one of them.",
            "Start one process for each instance (TF_CONFIG), or have MIG switched off: "
            "nvidia-smi -mig 0",
        )
    if seen == 0 and shown and machine.gpu_build and not machine.driver.unreachable:
        missing = missing_libraries(machine.libraries, machine.cuda_built)
        named = f"not found: {listed(missing)}" if missing else "all of them were found"
        yield Finding(
            "error",
            "no-cuda-libraries",
            f"The driver shows {len(shown)} GPU(s), TensorFlow sees none. CUDA libraries {named}; "
            f"it is built against CUDA {machine.cuda_built}, cuDNN {machine.cudnn_built}.",
            "Where one library is missing or of another version TensorFlow drops all GPUs, with "
            "one line in its log ('Cannot dlopen some GPU libraries').",
            f"{_INSTALL}, into this environment, and take other CUDA folders out of "
            "LD_LIBRARY_PATH",
        )
    elif 0 < seen < len(shown) and not cut:
        yield Finding(
            "warning",
            "gpus-ignored",
            f"The driver shows {len(shown)} GPUs, TensorFlow takes {seen} of them: "
            f"{listed([gpu.name for gpu in shown])}.",
            "TensorFlow leaves out GPUs that are much smaller than the others (fewer "
            "multiprocessors) or too old for it.",
            "To use the smaller ones too: TF_MIN_GPU_MULTIPROCESSOR_COUNT=4 in the environment, "
            "with shares=tmg.plan_shares(...) so that they do not hold up the rest.",
        )
    elif seen > len(shown) and all_gpus and not cut and asked is not None:
        yield Finding(
            "warning",
            "variable-too-late",
            f"CUDA_VISIBLE_DEVICES={devices_shown(asked)} shows {len(shown)} GPU(s), but "
            f"TensorFlow sees {seen}: it was set after TensorFlow had looked.",
            "The variable is read once, when the first device is listed.",
            "Set it before import tensorflow, or in the shell; or call "
            "tmg.devices.restrict_devices([...]) instead.",
        )


def _variable(machine: Machine, asked: str, shown: int) -> Iterator[Finding]:
    total = len(machine.driver.gpus)
    value = f"CUDA_VISIBLE_DEVICES={devices_shown(asked)}"
    entries = [entry.strip() for entry in asked.split(",")]
    of = f"of the {total} GPU(s) that the driver sees" if total else "of those that may be here"
    twice = [entry for entry, count in Counter(entries).items() if count > 1 and entry]
    if asked.strip() in _NONE:
        seen = max(total, machine.driver.cards)
        yield Finding(
            "error" if seen else "note",
            "gpus-hidden",
            f"{value} hides every GPU from TensorFlow: it sees none {of}.",
            "Training runs on the CPU, without a message.",
            "unset CUDA_VISIBLE_DEVICES, before Python starts",
        )
    elif twice:
        yield Finding(
            "error",
            "gpu-twice",
            f"{value} names a GPU twice, and CUDA then shows none {of}.",
            "Training runs on the CPU, without a message.",
            "CUDA_VISIBLE_DEVICES=" + devices_shown(",".join(dict.fromkeys(entries))).strip("'"),
        )
    elif total and shown < len(entries):
        yield Finding(
            "error" if shown <= 1 < total else "warning",
            "gpu-list-cut",
            f"{value} names {len(entries)} GPUs, and {shown} {of} are shown: at the first entry "
            "that is no GPU, CUDA stops reading.",
            "The GPUs named after it are idle, without a message.",
            f"Name GPUs from 0 to {total - 1}: CUDA_VISIBLE_DEVICES="
            + ",".join(str(index) for index in range(total)),
        )
    elif total and shown < total:
        yield Finding(
            "error" if shown == 1 and len(machine.gpus) <= 1 else "warning",
            "gpus-hidden",
            f"{value} shows TensorFlow {shown} {of}.",
            "The others are idle. A scheduler may have meant it so: they then belong to somebody "
            "else.",
            "unset CUDA_VISIBLE_DEVICES, before Python starts, or name them all: "
            "CUDA_VISIBLE_DEVICES=" + ",".join(str(index) for index in range(total)),
        )


def _hidden(machine: Machine) -> Iterator[Finding]:
    hidden = [gpu.name for gpu in machine.gpus if gpu.name not in machine.visible]
    if hidden:
        used = len(machine.used_gpus)
        yield Finding(
            "error" if used <= 1 else "warning",
            "gpus-hidden-by-program",
            f"{used} of {len(machine.gpus)} GPUs are used: the program hid {listed(hidden)} "
            "(tf.config.set_visible_devices or tmg.devices.restrict_devices).",
            "Hidden GPUs are idle, and the rest are numbered anew from GPU:0.",
            "Remove the call, or name them all: tmg.devices.restrict_devices("
            f"{[gpu.name for gpu in machine.gpus]!r})",
        )


def _cluster(machine: Machine) -> Iterator[Finding]:
    environment, plan = machine.environment, machine.plan
    if machine.plan_problem is not None:
        text = concealed(str(machine.plan_problem), environment).split(" Received:")[0]
        yield Finding(
            "error",
            "cluster",
            f"create_strategy() would raise {type(machine.plan_problem).__name__}: {text}",
            "TensorFlow itself would hang, or train on this machine alone without a message.",
            next(
                (source.fix for source in SOURCES if source.is_present(environment)),
                "Start every worker as its scheduler does, or train alone",
            ),
        )
    if plan is None:
        return
    cluster = plan.cluster
    if cluster is None:
        yield from _not_started_by_its_scheduler(environment)
    elif len(cluster.workers) == 1 and cluster.index == 0 and plan.kind != "multi_worker":
        yield Finding(
            "warning",
            "cluster-of-one",
            f"{cluster.source} describes a cluster of one worker, so only this machine trains.",
            "With several machines meant, the others are idle or train alone.",
            f"List every worker in {cluster.source}; for one machine unset "
            f"{listed(cluster.source.variables)}",
        )
    if plan.kind == "multi_worker" and machine.started and not machine.joined:
        yield Finding(
            "error",
            "started-before-cluster",
            f"{'The environment' if cluster is None else cluster.source} describes a cluster, but "
            "TensorFlow has started its devices and cannot join it any more.",
            "create_strategy() raises ClusterError, and the other workers wait.",
            "Move tmg.create_strategy() up, directly after the imports.",
        )


def _not_started_by_its_scheduler(environment: Mapping[str, str]) -> Iterator[Finding]:
    for source in SOURCES:
        why = source.why_absent(environment) if source.start else None
        if why is not None:
            yield Finding(
                "warning",
                f"{source.name.lower()}-alone",
                f"{why[0].upper()}{why[1:]}, so it trains alone.",
                "The other tasks do not run, or each trains the same model by itself.",
                source.start,
            )


def _tpu(machine: Machine) -> Iterator[Finding]:
    name = next((one for one in ("TPU_NAME", "COLAB_TPU_ADDR") if machine.environment.get(one)), "")
    missing = None if machine.plan is None else machine.plan.rejected.get("tpu")
    if name and missing is not None:
        yield Finding(
            "warning",
            "tpu-missing",
            f"{name} is set, but no TPU answers: {concealed(missing, machine.environment)}.",
            "TensorFlow would wait for it, for minutes; create_strategy() takes the next best.",
            f"Correct the address, or unset {name}",
        )


def _what_is_left(machine: Machine, found: list[Finding]) -> Iterator[Finding]:
    """What to say where nothing above explains it."""
    used = len(machine.used_gpus)
    if any(finding.severity == "error" for finding in found):
        return
    kind = None if machine.plan is None else machine.plan.kind
    if used > 1:
        yield Finding(
            "note",
            "ask-explain",
            f"Nothing here keeps the {used} GPUs from being used. Where a program uses one of "
            "them, the cause is in the program.",
            "A model built outside the scope of the strategy trains on one device, without a "
            "message.",
            "print(tmg.explain(model, optimizer, dataset, strategy)) in that program",
        )
    elif used == 1 and kind != "multi_worker":
        yield Finding(
            "note",
            "one-gpu",
            f"{machine.used_gpus[0].name} is the only GPU that is here.",
            "There is nothing to distribute: create_strategy() takes this one.",
            "Nothing to change; to try several replicas: tmg.split_device('CPU:0', parts=4)",
        )
    elif used == 0 and kind not in ("multi_worker", "tpu"):
        codes = {finding.code for finding in found}
        if not codes & {"cpu-build", "gpus-hidden"}:
            yield Finding(
                "note",
                "no-gpu",
                "No GPU is here: TensorFlow sees none, the NVIDIA driver sees none, and there is "
                "no NVIDIA card on the bus.",
                "Training runs on the CPU.",
                "Run it on a machine with GPUs; where this should be one, nvidia-smi must list "
                "them first",
            )
