"""The choice of a strategy and its reasons: a pure function of the facts about the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfmultigpu.devices.names import listed, resolve_devices
from tfmultigpu.errors import StrategyUnavailableError
from tfmultigpu.strategies.process_state import ClusterDescription
from tfmultigpu.strategies.tpu import Tpu

__all__ = [
    "COMMUNICATIONS",
    "KINDS",
    "MachineInfo",
    "StrategyPlan",
    "choose",
]

KINDS = ("tpu", "multi_worker", "mirrored", "one_device")
_WAYS = ("nccl", "ring", "hierarchical_copy", "one_device")
COMMUNICATIONS = ("auto", *_WAYS)

_NO_TPU = Tpu(None, "", "nobody looked for a TPU")
_HINTS = {
    "TF_GPU_THREAD_MODE": "TF_GPU_THREAD_MODE=gpu_private gives each GPU its own threads for "
    "starting kernels; try it if the input pipeline keeps the CPU busy.",
    "TF_FORCE_GPU_ALLOW_GROWTH": "TF_FORCE_GPU_ALLOW_GROWTH=true takes GPU memory only as needed, "
    "for a GPU that other programs use too.",
    "NCCL_DEBUG": "NCCL_DEBUG=INFO makes NCCL log the links that it uses, if the first step hangs "
    "or the sum of the gradients is slow.",
}


@dataclass(frozen=True)
class MachineInfo:
    """Facts that the decision depends on.

    Attributes:
        devices: Every logical device and the physical device behind it, in order.
        tpu: Whether a TPU answers.
        cluster: The cluster, if one is described.
        no_cluster: Why no cluster is described.
        nccl: Whether this TensorFlow has NCCL.
        no_gpu: Why there is no GPU.
        ring_over: The devices of the ring of this process, if there is one.
        environment: The names of the environment variables that are set.
    """

    devices: Mapping[str, str]
    tpu: Tpu = _NO_TPU
    cluster: ClusterDescription | None = None
    no_cluster: str = "TF_CONFIG is not set"
    nccl: bool = True
    no_gpu: str = "TensorFlow finds none"
    ring_over: tuple[str, ...] | None = None
    environment: frozenset[str] = frozenset()

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Returns the logical devices of a kind."""
        return tuple(name for name in self.devices if name.startswith(f"{kind}:"))

    def shared(self, devices: Sequence[str]) -> bool:
        """Returns whether two of the devices are parts of one physical device."""
        return len({self.devices[name] for name in devices}) < len(devices)


@dataclass(frozen=True)
class StrategyPlan:
    """A choice of devices and communication, with its reasons.

    Attributes:
        kind: ``"tpu"``, ``"multi_worker"``, ``"mirrored"`` or ``"one_device"``.
        devices: The devices of this process; for a TPU its address.
        num_replicas: The number over all workers; None for a TPU, whose cores are known only once
            it answers.
        reason: Why this kind.
        rejected: For each other kind, why not.
        communication: How the replicas add their gradients: one of the choices, ``"none"`` for one
            replica, ``"tpu"`` for a TPU.
        communication_reason: Why this way.
        unmet: The requests that this machine cannot meet, each with its reason.
        hints: Settings of the environment that may help; the library does not set them.
        cluster: The cluster that was described, if any; other kinds than ``"multi_worker"`` do not
            use it.
    """

    kind: str
    devices: tuple[str, ...]
    num_replicas: int | None
    reason: str
    rejected: Mapping[str, str]
    communication: str
    communication_reason: str
    unmet: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    cluster: ClusterDescription | None = None

    def __str__(self) -> str:
        """Returns the plan, one line for each question about it."""
        count = "as many replicas as it has cores"
        if self.num_replicas is not None:
            count = f"{self.num_replicas} replica{'s' if self.num_replicas > 1 else ''}"
        lines = [
            f"{self.kind}: {count} on {listed(self.devices)}",
            f"  because {self.reason}",
            f"  gradients are added by {self.communication}: {self.communication_reason}",
        ]
        lines += [f"  not {kind}: {why}" for kind, why in self.rejected.items()]
        lines += [f"  requested but unavailable: {what}" for what in self.unmet]
        lines += [f"  hint: {hint}" for hint in self.hints]
        return "\n".join(lines)


class _Choice(NamedTuple):
    kind: str
    devices: tuple[str, ...]
    num_replicas: int | None
    reason: str


def choose(
    facts: MachineInfo,
    prefer: str = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: str = "auto",
) -> StrategyPlan:
    """Chooses the strategy; pure.

    Args:
        facts: The facts about the machine and its environment.
        prefer: ``"auto"`` or one of ``KINDS``.
        devices: Names, or a count; None for all that make sense.
        communication: One of ``COMMUNICATIONS``.

    Raises:
        DeviceNotFoundError: A device does not exist.
        StrategyUnavailableError: ``prefer``, ``devices`` and the cluster contradict each other.
        ValueError: An argument is not one of the choices.

    Example:
        >>> choose(MachineInfo({"CPU:0": "CPU:0", "GPU:0": "GPU:0", "GPU:1": "GPU:1"})).devices
        ('GPU:0', 'GPU:1')
    """
    _check("prefer", prefer, ("auto", *KINDS))
    _check("communication", communication, COMMUNICATIONS)
    explicit = None if prefer == "tpu" else _explicit(facts, devices)
    if prefer == "one_device" and explicit is not None and len(explicit) > 1:
        raise StrategyUnavailableError(
            f"prefer='one_device' runs on one device, but devices={devices!r} names "
            f"{len(explicit)}. Name one, devices={[explicit[0]]!r}, or write prefer='mirrored'."
        )
    rejected: dict[str, str] = {}
    unmet: list[str] = []
    found = None
    for kind in KINDS[:-1] if prefer == "auto" else KINDS[KINDS.index(prefer) : -1]:
        attempt = _try(kind, facts, prefer, explicit)
        if isinstance(attempt, _Choice):
            found = attempt
            break
        rejected[kind] = attempt
        evaluator = kind == "multi_worker" and facts.cluster is not None
        one_named = kind == "mirrored" and explicit is not None
        if kind == prefer and not evaluator and not one_named:
            unmet.append(f"prefer={prefer!r}: {attempt}")
    found = found or _one_device(facts, explicit)
    for kind in KINDS:
        if kind != found.kind and kind not in rejected:
            rejected[kind] = (
                f"prefer={prefer!r} was requested"
                if prefer != "auto" and KINDS.index(kind) < KINDS.index(prefer)
                else f"{found.kind} comes first"
            )
    how, why, refused = _communication(communication, found, facts)
    if refused is not None:
        unmet.append(f"communication={communication!r}: {refused}")
    return StrategyPlan(
        kind=found.kind,
        devices=found.devices,
        num_replicas=found.num_replicas,
        reason=found.reason,
        rejected={kind: rejected[kind] for kind in KINDS if kind in rejected},
        communication=how,
        communication_reason=why,
        unmet=tuple(unmet),
        hints=_hints(found, how, facts),
        cluster=facts.cluster,
    )


def _check(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}. Received: {name}={value!r}.")


def _explicit(
    facts: MachineInfo, devices: int | str | Sequence[str] | None
) -> tuple[str, ...] | None:
    """Returns the requested devices; a count means GPUs if there are any, CPUs otherwise."""
    if devices is None:
        return None
    counted = facts.of_kind("GPU") or facts.of_kind("CPU")
    names = resolve_devices(devices, counted if isinstance(devices, int) else tuple(facts.devices))
    kinds = sorted({name.split(":")[0] for name in names})
    if len(kinds) > 1:
        keep = [name for name in names if not name.startswith("CPU:")]
        raise StrategyUnavailableError(
            f"devices={list(names)!r} mixes {' and '.join(kinds)}. Every step would wait for the "
            f"slowest of them. Name devices of one kind: devices={keep!r}."
        )
    if kinds == ["TPU"]:
        raise StrategyUnavailableError(
            f"devices={list(names)!r} names TPU cores, and a TPU is used whole. Leave devices out "
            "and write prefer='tpu'."
        )
    return names


def _try(
    kind: str, facts: MachineInfo, prefer: str, explicit: tuple[str, ...] | None
) -> _Choice | str:
    """Returns the choice if this kind is available, otherwise why it is not."""
    if kind == "tpu":
        return _tpu(facts, explicit)
    if kind == "multi_worker":
        return _multi_worker(facts, prefer, explicit)
    return _mirrored(facts, prefer, explicit)


def _tpu(facts: MachineInfo, explicit: tuple[str, ...] | None) -> _Choice | str:
    if explicit is not None:
        return f"devices names {listed(explicit)}"
    if facts.tpu.missing is not None:
        return facts.tpu.missing
    cores = facts.of_kind("TPU")
    where = cores or (str(facts.tpu.address),)
    return _Choice("tpu", where, len(cores) or None, f"a TPU answers ({facts.tpu.source})")


def _multi_worker(
    facts: MachineInfo, prefer: str, explicit: tuple[str, ...] | None
) -> _Choice | str:
    cluster = facts.cluster
    if cluster is None:
        return f"no cluster is described: {facts.no_cluster}"
    if cluster.index is None:
        return "this process is the evaluator, which runs alone beside the workers"
    if len(cluster.workers) == 1 and prefer != "multi_worker":
        return "the cluster has one worker, which needs no network to train"
    gpus = facts.of_kind("GPU")
    local = explicit or gpus or ("CPU:0",)
    if local != ("CPU:0",) and local != gpus[: len(local)]:
        usable = f"the first GPUs in order ({listed(gpus)})" if gpus else "CPU:0 alone"
        raise StrategyUnavailableError(
            f"devices={list(local)!r} cannot be combined with the cluster of {cluster.source} "
            f"({len(cluster.workers)} workers): there TensorFlow uses {usable}. Hide the others "
            "before TensorFlow starts, tf.config.set_visible_devices(...) or "
            "CUDA_VISIBLE_DEVICES, and leave devices out; or train alone: prefer='mirrored'."
        )
    return _Choice(
        "multi_worker",
        local,
        len(local) * len(cluster.workers),
        f"this is {cluster}, {len(local)} device{'s' if len(local) > 1 else ''} on each",
    )


def _mirrored(facts: MachineInfo, prefer: str, explicit: tuple[str, ...] | None) -> _Choice | str:
    gpus, cpus = facts.of_kind("GPU"), facts.of_kind("CPU")
    if explicit is not None:
        chosen, reason = explicit, f"devices names {listed(explicit)}"
    elif gpus:
        chosen, reason = gpus, f"{len(gpus)} GPUs are here"
    elif prefer == "mirrored":
        chosen, reason = cpus, f"there is no GPU ({facts.no_gpu}), and {len(cpus)} logical CPUs"
    else:
        more = "; prefer='mirrored' uses the logical CPUs" if len(cpus) > 1 else ""
        return f"there is no GPU ({facts.no_gpu}){more}"
    if len(chosen) > 1:
        return _Choice("mirrored", chosen, len(chosen), reason)
    return f"{chosen[0]} is the only device, and one device has nothing to mirror"


def _one_device(facts: MachineInfo, explicit: tuple[str, ...] | None) -> _Choice:
    gpus = facts.of_kind("GPU")
    if explicit is not None:
        return _Choice("one_device", explicit, 1, f"devices names {listed(explicit)}")
    if gpus:
        only = "is the only GPU" if len(gpus) == 1 else f"is the first of {len(gpus)} GPUs"
        return _Choice("one_device", gpus[:1], 1, f"{gpus[0]} {only}")
    return _Choice("one_device", ("CPU:0",), 1, f"there is no GPU: {facts.no_gpu}")


def _communication(asked: str, choice: _Choice, facts: MachineInfo) -> tuple[str, str, str | None]:
    """Returns how to add gradients, why, and why not as requested."""
    if choice.kind == "one_device":
        return "none", "one replica has nothing to add", None
    if choice.kind == "tpu":
        own = "a TPU adds over its own interconnect"
        return "tpu", own, None if asked == "auto" else own
    possible, why = _possible(choice, facts)
    if asked == "auto":
        best = possible[0]
    elif asked in possible:
        return asked, "it was requested", None
    else:
        best = possible[0]
        return best, f"{asked} was requested, but {why[asked]}", why[asked]
    return best, why[best], None


def _possible(choice: _Choice, facts: MachineInfo) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the ways that work, best first, and the reasons for the best and against others."""
    devices = choice.devices
    on_cpu = devices[0].startswith("CPU:")
    no_nccl = None
    if on_cpu:
        no_nccl = "NCCL runs on GPUs only, and these are CPUs"
    elif facts.shared(devices):
        no_nccl = f"NCCL cannot join {listed(devices)}: some are parts of one physical GPU"
    elif not facts.nccl:
        no_nccl = "this TensorFlow is built without NCCL"
    if choice.kind == "multi_worker":
        between = "between workers TensorFlow has NCCL and ring only"
        why = {"hierarchical_copy": between, "one_device": between}
        if no_nccl is None:
            return ("nccl", "ring"), {**why, "nccl": "the GPUs are whole"}
        return ("ring",), {**why, "nccl": no_nccl, "ring": no_nccl}
    possible = ["one_device"] if no_nccl else ["nccl", "one_device"]
    why = {"nccl": no_nccl or "every replica has a GPU to itself"}
    if no_nccl:
        why["one_device"] = f"{no_nccl}; of what works this is fastest"
    if len(devices) % 2 == 0:
        possible.append("hierarchical_copy")
    else:
        why["hierarchical_copy"] = (
            f"over {len(devices)} devices, an odd number, TensorFlow's hierarchical copy silently "
            "leaves out the gradients of the last"
        )
    if not on_cpu:
        why["ring"] = "on the GPUs of one machine TensorFlow offers no ring; NCCL makes its own"
    elif facts.ring_over not in (None, devices):
        why["ring"] = (
            f"a ring over {listed(facts.ring_over or ())} exists in this process, and TensorFlow "
            "aborts every ring as soon as two over different devices have been used"
        )
    else:
        possible.append("ring")
    return tuple(possible), why


def _hints(choice: _Choice, communication: str, facts: MachineInfo) -> tuple[str, ...]:
    names = []
    if choice.devices[0].startswith("GPU:"):
        names += ["TF_GPU_THREAD_MODE", "TF_FORCE_GPU_ALLOW_GROWTH"]
    if communication == "nccl":
        names.append("NCCL_DEBUG")
    hints = [_HINTS[name] for name in names if name not in facts.environment]
    if choice.kind == "mirrored" and facts.shared(choice.devices):
        hints.append(
            f"{listed(choice.devices)} share a physical device: this tests a program, it does not "
            "make it faster."
        )
    return tuple(hints)
