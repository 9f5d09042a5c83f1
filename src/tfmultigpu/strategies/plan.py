"""The choice of a strategy and its reasons: a pure function of the facts about the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from tfmultigpu.devices.missing_gpus import MissingGpus
from tfmultigpu.devices.names import listed, resolve_devices
from tfmultigpu.errors import StrategyUnavailableError
from tfmultigpu.strategies.process_state import ClusterDescription
from tfmultigpu.strategies.tpu import NO_TPU, Tpu
from tfmultigpu.types import Communication, Prefer

COMMUNICATIONS: tuple[str, ...] = get_args(Communication)
_Names = tuple[str, ...] | None


@dataclass(frozen=True)
class MachineInfo:
    """Facts that the decision depends on."""

    devices: Mapping[str, str]  # The physical device of each logical device, in order.
    tpu: Tpu = NO_TPU
    cluster: ClusterDescription | None = None
    no_cluster: str = "TF_CONFIG is not set"  # Why no cluster is described.
    nccl: bool = True
    missing_gpus: MissingGpus | None = None  # None if all GPUs of the machine are used.

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Returns the logical devices of a kind."""
        return tuple(name for name in self.devices if name.startswith(f"{kind}:"))

    def shared(self, devices: Sequence[str]) -> bool:
        """Returns whether two of the devices are parts of one physical device."""
        return len({self.devices[name] for name in devices}) < len(devices)

    def explained(self, statement: str) -> str:
        """Adds to a statement about GPUs why there are no more, if that is known."""
        missing = self.missing_gpus
        return statement if missing is None else f"{statement}: {missing.reason}"


@dataclass(frozen=True)
class StrategyPlan:
    """A choice of devices and communication, with its reasons.

    Attributes:
        kind: ``"tpu"``, ``"multi_worker"``, ``"mirrored"`` or ``"one_device"``.
        devices: The devices of this process; for a TPU its address.
        num_replicas: The number over all workers; None for a TPU that is not connected.
        reason: Why this kind.
        rejected: For each other kind, why not.
        communication: How the strategy adds over replicas; ``"none"`` for one replica.
        communication_reason: Why this way.
        unmet: The requests that this machine cannot meet, each with its reason.
        more_gpus: Why there are no more GPUs and what to do, if somebody may wonder.
        cluster: The cluster that is described, if any.
    """

    kind: str
    devices: tuple[str, ...]
    num_replicas: int | None
    reason: str
    rejected: Mapping[str, str]
    communication: str
    communication_reason: str
    unmet: tuple[str, ...] = ()
    more_gpus: str = ""
    cluster: ClusterDescription | None = None

    def __str__(self) -> str:
        """Returns the plan, one line for each question about it."""
        count = "a replica on each core of" if self.num_replicas is None else "1 replica on"
        if self.num_replicas not in (None, 1):
            count = f"{self.num_replicas} replicas on"
        lines = [
            f"{self.kind}: {count} {listed(self.devices)}",
            f"  because {self.reason}",
            f"  gradients are added by {self.communication}: {self.communication_reason}",
        ]
        lines += [f"  not {kind}: {why}" for kind, why in self.rejected.items()]
        lines += [f"  requested but unavailable: {what}" for what in self.unmet]
        lines += [f"  {self.more_gpus}"] if self.more_gpus else []
        return "\n".join(lines)


class _Offer(NamedTuple):
    devices: tuple[str, ...]
    num_replicas: int | None
    reason: str


class _No(NamedTuple):
    why: str
    unmet: bool = True  # False if who asked for this kind means the next one.


def choose(
    facts: MachineInfo,
    prefer: str = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: str = "auto",
) -> StrategyPlan:
    """Chooses the strategy by the arguments of ``create_strategy``; pure."""
    _check("prefer", prefer, get_args(Prefer))
    _check("communication", communication, COMMUNICATIONS)
    names = None if prefer == "tpu" else _named_devices(facts, devices)
    chosen: tuple[str, _Offer] | None = None
    rejected: dict[str, str] = {}
    unmet: list[str] = []
    for kind, offer in _OFFERS.items():
        if chosen is not None:
            rejected[kind] = f"{chosen[0]} comes first"
        elif prefer != "auto" and KINDS.index(kind) < KINDS.index(prefer):
            rejected[kind] = f"prefer={prefer!r} was requested"
        elif isinstance(answer := offer(facts, prefer, names), _Offer):
            chosen = kind, answer
        else:
            rejected[kind] = answer.why
            if kind == prefer and answer.unmet:
                unmet.append(f"prefer={prefer!r}: {answer.why}")
    assert chosen is not None, "one device is always there"
    kind, taken = chosen
    way, why, refused = _addition(kind, communication, taken.devices, facts)
    if refused is not None:
        unmet.append(f"communication={communication!r}: {refused}")
    few = kind != "tpu" and (len(taken.devices) == 1 or taken.devices[0].startswith("CPU:"))
    counted = devices is None or isinstance(devices, int)
    more_gpus = str(facts.missing_gpus or "") if few and counted else ""
    told = tuple(unmet), more_gpus, facts.cluster
    return StrategyPlan(kind, *taken, rejected, way, why, *told)


def _check(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        small = str(value).lower()
        line = f"{name}={small if small in choices else 'auto'!r}"
        if name == "prefer" and not (isinstance(value, str) and value.isidentifier()):
            line = f"devices={value!r}"
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}. Received: {name}={value!r}. Write {line}."
        )


def _named_devices(facts: MachineInfo, devices: int | str | Sequence[str] | None) -> _Names:
    """Returns the requested devices; a count means GPUs if there are any, CPUs otherwise."""
    if devices is None:
        return None
    counted = facts.of_kind("GPU") or facts.of_kind("CPU")
    existing = counted if isinstance(devices, int) else tuple(facts.devices)
    names = resolve_devices(devices, existing, str(facts.missing_gpus or ""))
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


def _offer_tpu(facts: MachineInfo, prefer: str, names: _Names) -> _Offer | _No:
    if names is not None:
        return _No(f"devices names {listed(names)}")
    if facts.tpu.missing is not None:
        return _No(facts.tpu.missing)
    cores = facts.of_kind("TPU")
    where = cores or (str(facts.tpu.address),)
    return _Offer(where, len(cores) or None, f"a TPU answers ({facts.tpu.source})")


def _offer_workers(facts: MachineInfo, prefer: str, names: _Names) -> _Offer | _No:
    cluster = facts.cluster
    if cluster is None:
        return _No(f"no cluster is described: {facts.no_cluster}")
    if cluster.index is None:
        return _No("this process is the evaluator, which runs alone beside the workers", False)
    count = len(cluster.workers)
    if count == 1 and prefer != "multi_worker":
        return _No("the cluster has one worker, which needs no network to train")
    gpus = facts.of_kind("GPU")
    local = names or gpus or ("CPU:0",)
    if local != ("CPU:0",) and local != gpus[: len(local)]:
        usable = f"the first GPUs in order ({listed(gpus)})" if gpus else "CPU:0 alone"
        raise StrategyUnavailableError(
            f"devices={list(local)!r} cannot be combined with the cluster of {cluster.source} "
            f"({count} workers): there TensorFlow uses {usable}. Set CUDA_VISIBLE_DEVICES to your "
            "choice before Python starts, and leave devices out; or train alone: "
            "prefer='mirrored'." + ("" if gpus else f" {facts.missing_gpus or ''}")
        )
    each = f"{len(local)} device{'s' if len(local) > 1 else ''} on each"
    return _Offer(local, len(local) * count, f"this is {cluster}, {each}")


def _offer_mirrored(facts: MachineInfo, prefer: str, names: _Names) -> _Offer | _No:
    gpus, cpus = facts.of_kind("GPU"), facts.of_kind("CPU")
    no_gpu = facts.explained("there is no GPU")
    if names is not None:
        chosen, reason = names, f"devices names {listed(names)}"
    elif gpus:
        chosen, reason = gpus, f"{len(gpus)} GPUs are here"
    elif prefer == "mirrored":
        chosen, reason = cpus, f"{no_gpu}; so on {len(cpus)} logical CPUs"
    else:
        more = "; prefer='mirrored' uses the logical CPUs" if len(cpus) > 1 else ""
        return _No(f"{no_gpu}{more}")
    if len(chosen) == 1:
        only = f"{chosen[0]} is the only device, and one device has nothing to mirror"
        named = names is not None
        return _No(only if named else facts.explained(only), unmet=not named)
    if facts.shared(chosen):
        reason += ", parts of one physical device: that tests a program, and is no faster"
    return _Offer(chosen, len(chosen), reason)


def _offer_one_device(facts: MachineInfo, prefer: str, names: _Names) -> _Offer:
    gpus = facts.of_kind("GPU")
    if names is not None and len(names) > 1:
        raise StrategyUnavailableError(
            f"prefer='one_device' runs on one device, but devices names {listed(names)}. Name "
            f"one, devices={[names[0]]!r}, or write prefer='mirrored'."
        )
    if names is not None:
        return _Offer(names, 1, f"devices names {names[0]}")
    if not gpus:
        return _Offer(("CPU:0",), 1, facts.explained("there is no GPU"))
    first = f"{gpus[0]} is the first of {len(gpus)} GPUs"
    only = facts.explained(f"{gpus[0]} is the only GPU")
    return _Offer(gpus[:1], 1, only if len(gpus) == 1 else first)


_OFFERS: dict[str, Callable[[MachineInfo, str, _Names], _Offer | _No]] = {
    "tpu": _offer_tpu,
    "multi_worker": _offer_workers,
    "mirrored": _offer_mirrored,
    "one_device": _offer_one_device,
}
KINDS = tuple(_OFFERS)  # In the order in which they are tried.


def _addition(
    kind: str, asked: str, devices: Sequence[str], facts: MachineInfo
) -> tuple[str, str, str | None]:
    """Returns how to add over replicas, why, and why not as requested."""
    if kind == "one_device":
        return "none", "one replica has nothing to add", None
    if kind == "tpu":
        own = "a TPU adds over its own interconnect"
        return "tpu", own, None if asked == "auto" else own
    on_cpus = devices[0].startswith("CPU:")
    fails: dict[str, str] = {}
    if on_cpus:
        fails["nccl"] = "NCCL runs on GPUs only, and these are CPUs"
    elif facts.shared(devices):
        fails["nccl"] = f"NCCL cannot join {listed(devices)}: some are parts of one physical GPU"
    elif not facts.nccl:
        fails["nccl"] = "this TensorFlow is built without NCCL"
    best_first: tuple[str, ...] = ("nccl", "one_device")
    if kind == "multi_worker":
        best_first = ("nccl", "ring")
        between = "between workers TensorFlow has NCCL and ring only"
        fails |= {"one_device": between, "hierarchical_copy": between}
    else:
        fails["ring"] = (
            "it is for workers; TensorFlow has none for the GPUs of one machine, and on CPUs it "
            "aborts every ring of a process once two have been used"
        )
    if len(devices) % 2:
        fails.setdefault(
            "hierarchical_copy",
            f"over {len(devices)} devices, an odd number, TensorFlow's silently leaves out the "
            "gradients of the last",
        )
    if asked not in ("auto", *fails):
        return asked, "it was requested", None
    best = next(way for way in best_first if way not in fails)
    if asked == "auto":
        return best, fails.get("nccl", "every replica has a GPU to itself"), None
    return best, f"{asked} was requested, but {fails[asked]}", fails[asked]
