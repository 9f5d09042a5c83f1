"""The choice of a strategy and its reasons: a pure function of the facts about the machine."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple, get_args

from tfmultigpu.arguments import brief
from tfmultigpu.clusters import Cluster
from tfmultigpu.devices.names import listed, resolve_devices
from tfmultigpu.errors import StrategyUnavailableError
from tfmultigpu.strategies.tpu import NO_TPU, Tpu
from tfmultigpu.types import Communication, Prefer

COMMUNICATIONS: tuple[str, ...] = get_args(Communication)
_ADDITIONS_OF_ONE_PROCESS: tuple[str, ...] = ("nccl", "one_device", "hierarchical_copy")
_Names = tuple[str, ...] | None


@dataclass(frozen=True)
class MachineInfo:
    """Facts that the decision depends on."""

    devices: Mapping[str, str]  # The physical device of each logical device, in order.
    tpu: Tpu = NO_TPU
    cluster: Cluster | None = None
    no_cluster: str = "TF_CONFIG is not set"  # Why no cluster is described.
    nccl: bool = True
    no_more_gpus: str | None = None  # Why TensorFlow uses no more GPUs; None if it uses all.

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Returns the logical devices of a kind."""
        return tuple(name for name in self.devices if name.startswith(f"{kind}:"))

    def explained(self, statement: str) -> str:
        """Adds to a statement about GPUs why there are no more, if that is known."""
        if not self.no_more_gpus:
            return statement
        return f"{statement}: {self.no_more_gpus}"


@dataclass(frozen=True)
class StrategyPlan:
    """A choice of devices and communication, with its reasons.

    Attributes:
        kind: ``"tpu"``, ``"multi_worker"``, ``"mirrored"`` or ``"one_device"``.
        devices: The devices of this process; for a TPU its address.
        num_replicas: The number over all workers; None for a TPU that is not connected.
        reason: Why this kind was chosen.
        rejected: For each other kind, why it was not chosen.
        communication: How the strategy adds over replicas; ``"none"`` for one replica.
        communication_reason: Why it adds this way.
        unmet: The requests that this machine cannot meet, each with its reason.
    """

    kind: str
    devices: tuple[str, ...]
    num_replicas: int | None
    reason: str
    rejected: Mapping[str, str]
    communication: str
    communication_reason: str
    unmet: tuple[str, ...] = ()

    def __repr__(self) -> str:  # Also what ``print`` and a notebook show.
        """Returns the plan, one line for each question about it."""
        count = f"{self.num_replicas} replicas on"
        if self.num_replicas is None:
            count = "a replica on each core of"
        elif self.num_replicas == 1:
            count = "1 replica on"
        lines = [
            f"{self.kind}: {count} {listed(self.devices)}",
            f"  because {self.reason}",
            f"  gradients are added by {self.communication}: {self.communication_reason}",
        ]
        lines += [f"  not {kind}: {why}" for kind, why in self.rejected.items()]
        lines += [f"  requested but unavailable: {what}" for what in self.unmet]
        return "\n".join(lines)


class _Offer(NamedTuple):
    devices: tuple[str, ...]
    num_replicas: int | None
    reason: str


def choose(
    facts: MachineInfo,
    prefer: str = "auto",
    devices: int | str | Sequence[str] | None = None,
    communication: str = "auto",
) -> StrategyPlan:
    """Chooses the strategy by the arguments of ``create_strategy``; pure."""
    for name, value, choices in (
        ("prefer", prefer, get_args(Prefer)),
        ("communication", communication, COMMUNICATIONS),
    ):
        if value not in choices:
            # "gpu" is nearer to "tpu" than the default of 0.6, and means something else.
            similar = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.7)
            line = 'Write "auto", and name devices in devices=["GPU:0", "GPU:1"].'
            if similar:
                line = f'Write {name}="{similar[0]}".'
            elif name == "prefer" and (not isinstance(value, str) or ":" in value):
                line = f"Write create_strategy(devices={value!r})."  # As the first argument.
            raise ValueError(
                f"{name} must be one of {', '.join(choices)}. Received: {name}={brief(value)}. "
                f"{line}"
            )
    names = _named_devices(facts, devices)
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
            rejected[kind] = answer
            if kind == prefer:
                unmet.append(f"prefer={prefer!r}: {answer}")
    assert chosen is not None, "one device is always there"
    kind, taken = chosen
    way, why, refused = _addition(kind, communication, taken.devices, facts)
    if refused is not None:
        unmet.append(f"communication={communication!r}: {refused}")
    return StrategyPlan(kind, *taken, rejected, way, why, tuple(unmet))


def _named_devices(facts: MachineInfo, devices: int | str | Sequence[str] | None) -> _Names:
    """Returns the requested devices; a count means GPUs if there are any, CPUs otherwise."""
    if devices is None:
        return None
    counted = facts.of_kind("GPU") or facts.of_kind("CPU")
    existing = tuple(facts.devices)
    if isinstance(devices, Real):  # Of NumPy, too.
        existing = counted
    names = resolve_devices(devices, existing, facts.no_more_gpus)
    kinds = {name.split(":")[0] for name in names}
    if len(kinds) > 1 or kinds == {"TPU"}:
        raise StrategyUnavailableError(
            f"devices={list(names)!r} must be of one kind, GPUs or CPUs: every step would wait "
            "for the slowest.",
            "",
            "A TPU is used whole: leave devices out and write prefer='tpu'.",
        )
    return names


def _offer_tpu(facts: MachineInfo, prefer: str, names: _Names) -> _Offer | str:
    if names is not None:
        return f"devices names {listed(names)}"
    if facts.tpu.missing is not None:
        return facts.tpu.missing
    cores = facts.of_kind("TPU")
    return _Offer(cores or (str(facts.tpu.address),), len(cores) or None, "a TPU answers")


def _offer_workers(facts: MachineInfo, prefer: str, names: _Names) -> _Offer | str:
    cluster = facts.cluster
    if cluster is None:
        return f"no cluster is described: {facts.no_cluster}"
    if cluster.index is None:
        return "this process is the evaluator, which runs alone beside the workers"
    count = len(cluster.workers)
    if count == 1 and prefer != "multi_worker":
        return "the cluster has one worker, which needs no network to train"
    gpus = facts.of_kind("GPU")
    local = names or gpus or ("CPU:0",)
    if local != ("CPU:0",) and local != gpus[: len(local)]:
        usable = "CPU:0 alone"
        if gpus:
            usable = f"the first GPUs in order ({listed(gpus)})"
        raise StrategyUnavailableError(
            f"devices={list(local)!r} cannot be combined with the cluster of {cluster.source}: "
            f"there TensorFlow uses {usable}.",
            "",
            "Set CUDA_VISIBLE_DEVICES before Python starts, and leave devices out; or train "
            "alone: prefer='mirrored'.",
        )
    each = "1 device on each"
    if len(local) > 1:
        each = f"{len(local)} devices on each"
    return _Offer(local, len(local) * count, f"this is {cluster}, {each}")


def _offer_mirrored(facts: MachineInfo, prefer: str, names: _Names) -> _Offer | str:
    gpus, cpus = facts.of_kind("GPU"), facts.of_kind("CPU")
    no_gpu = facts.explained("there is no GPU")
    if names is not None:
        chosen, reason = names, f"devices names {listed(names)}"
    elif gpus:
        chosen, reason = gpus, f"{len(gpus)} GPUs are here"
    elif prefer == "mirrored":
        chosen, reason = cpus, f"{no_gpu}; so on {len(cpus)} logical CPUs"
    else:
        more = ""
        if len(cpus) > 1:
            more = "; prefer='mirrored' uses the logical CPUs"
        return f"{no_gpu}{more}"
    if len(chosen) == 1:
        only = f"{chosen[0]} is the only device, and one device has nothing to mirror"
        if names is None:
            return facts.explained(only)
        return only
    return _Offer(chosen, len(chosen), reason)


def _offer_one_device(facts: MachineInfo, prefer: str, names: _Names) -> _Offer:
    gpus = facts.of_kind("GPU")
    if names is not None and len(names) > 1:
        raise StrategyUnavailableError(
            f"prefer='one_device' runs on one device, but devices names {listed(names)}.",
            "",
            f"Name one, devices={[names[0]]!r}, or write prefer='mirrored'.",
        )
    if names is not None:
        return _Offer(names, 1, f"devices names {names[0]}")
    if len(gpus) > 1:
        return _Offer(gpus[:1], 1, f"{gpus[0]} is the first of {len(gpus)} GPUs")
    only = "there is no GPU"
    if gpus:
        only = f"{gpus[0]} is the only GPU"
    why = facts.explained(only)
    return _Offer(gpus or ("CPU:0",), 1, why)


_OFFERS: dict[str, Callable[[MachineInfo, str, _Names], _Offer | str]] = {
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
        refused = None
        if asked == "nccl" and devices[0].startswith("CPU:"):
            refused = facts.explained("NCCL runs on GPUs only, and this is a CPU")
        return "none", "one replica has nothing to add", refused
    if kind == "tpu":
        interconnect = "a TPU adds over its own interconnect"
        if asked == "auto":
            return "tpu", interconnect, None
        return "tpu", interconnect, interconnect
    possible = _ADDITIONS_OF_ONE_PROCESS
    if kind == "multi_worker":
        possible = ("nccl", "ring")
    fails = {}
    for way in COMMUNICATIONS:
        if way not in ("auto", *possible):
            fails[way] = f"TensorFlow offers {listed(possible)} here"
    if devices[0].startswith("CPU:"):
        fails["nccl"] = facts.explained("NCCL runs on GPUs only, and these are CPUs")
    elif len({facts.devices[name] for name in devices}) < len(devices):
        fails["nccl"] = f"NCCL cannot join {listed(devices)}: some are parts of one physical GPU"
    elif not facts.nccl:
        fails["nccl"] = "this TensorFlow is built without NCCL"
    if len(devices) % 2:
        fails["hierarchical_copy"] = (
            f"over {len(devices)} devices, an odd number, TensorFlow's silently leaves out the "
            "gradients of the last"
        )
    if asked not in ("auto", *fails):
        return asked, "it was requested", None
    best = next(way for way in possible if way not in fails)
    why = fails.get("nccl", "every replica has a GPU to itself")
    return best, fails.get(asked, why), fails.get(asked)
