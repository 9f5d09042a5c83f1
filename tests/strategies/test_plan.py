"""The decision, as truth tables over machines that need not exist."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tfmultigpu.clusters import Cluster
from tfmultigpu.errors import DeviceNotFoundError, StrategyUnavailableError
from tfmultigpu.strategies.plan import COMMUNICATIONS, KINDS, MachineInfo, choose
from tfmultigpu.strategies.tpu import Tpu

NO_GPU = "none is here; buy one"
TPU = Tpu("grpc://10.0.0.2:8470", None)
NO_TPU = Tpu(None, "TPU_NAME is not set")
TWO_WORKERS = Cluster(("a:1", "b:1"), 1)
ONE_WORKER = Cluster(("a:1",), 0)
EVALUATOR = Cluster(("a:1", "b:1"), None)


def machine(
    gpus: int = 0,
    cpus: int = 1,
    *,
    tpu: Tpu = NO_TPU,
    cluster: Cluster | None = None,
    parts: int = 1,
    nccl: bool = True,
    no_more_gpus: str | None = NO_GPU,
) -> MachineInfo:
    """A machine with so many logical CPUs and GPUs; `parts` logical GPUs on each physical one."""
    devices = {f"CPU:{index}": "CPU:0" for index in range(cpus)}
    devices |= {f"GPU:{index}": f"GPU:{index // parts}" for index in range(gpus)}
    return MachineInfo(devices, tpu, cluster, nccl=nccl, no_more_gpus=no_more_gpus)


MACHINES = [
    (gpus, cpus, tpu, cluster)
    for gpus in (0, 1, 2, 8, 16)
    for cpus in (1, 8)
    for tpu in (NO_TPU, TPU)
    for cluster in (None, ONE_WORKER, TWO_WORKERS, EVALUATOR)
]


def gpu_names(count: int) -> tuple[str, ...]:
    return tuple(f"GPU:{index}" for index in range(count))


def test_what_is_preferred_is_taken_or_named_as_unmet_and_auto_follows_the_order() -> None:
    """Of every machine: a TPU, workers, all GPUs, one GPU, the CPU."""
    wrong = []
    for described, prefer in itertools.product(MACHINES, ("auto", *KINDS)):
        gpus, cpus, tpu, cluster = described
        plan = choose(machine(gpus, cpus, tpu=tpu, cluster=cluster), prefer)
        asked = prefer == "mirrored"
        # What each kind would run on, if it can.
        local = gpu_names(gpus) or ("CPU:0",)
        several = gpus > 1 or (asked and gpus == 0 and cpus > 1)
        workers = (TWO_WORKERS, ONE_WORKER) if prefer == "multi_worker" else (TWO_WORKERS,)
        cpu_names = tuple(f"CPU:{index}" for index in range(cpus))
        possible = {
            "tpu": (("grpc://10.0.0.2:8470",), None) if tpu is TPU else None,
            "multi_worker": (local, len(cluster.workers) * len(local))
            if cluster in workers
            else None,
            "mirrored": (gpu_names(gpus) or cpu_names, gpus or cpus) if several else None,
            "one_device": (local[:1], 1),
        }
        tried = KINDS if prefer == "auto" else KINDS[KINDS.index(prefer) :]
        kind = next(kind for kind in tried if possible[kind])
        unmet = () if prefer in ("auto", kind) else (f"prefer={prefer!r}: {plan.rejected[prefer]}",)
        if (
            (plan.kind, (plan.devices, plan.num_replicas), plan.unmet)
            != (kind, possible[kind], unmet)
            or list(plan.rejected) != [other for other in KINDS if other != kind]
            or not all(plan.rejected.values())
        ):
            wrong.append((described, prefer, plan))
    assert wrong == []


def test_what_is_named_is_taken(subtests: pytest.Subtests) -> None:
    named: list[tuple[MachineInfo, str, Any, str, tuple[str, ...]]] = [
        (machine(0, 8), "auto", 4, "mirrored", ("CPU:0", "CPU:1", "CPU:2", "CPU:3")),
        (machine(0, 8), "auto", ["CPU:6", "cpu:1"], "mirrored", ("CPU:6", "CPU:1")),
        (machine(4, 8), "auto", 2, "mirrored", gpu_names(2)),  # GPUs where there are any.
        (machine(4), "auto", ["/gpu:2"], "one_device", ("GPU:2",)),
        (machine(2, tpu=TPU), "auto", 2, "mirrored", gpu_names(2)),
        (machine(4), "auto", np.int64(2), "mirrored", gpu_names(2)),
        # Workers bring the first devices.
        *(
            (machine(gpus, 8, cluster=TWO_WORKERS), "auto", devices, "multi_worker", local)
            for gpus, devices, local in (
                (0, 1, ("CPU:0",)),
                (2, ["CPU:0"], ("CPU:0",)),
                (4, 2, gpu_names(2)),
                (4, ["GPU:0"], ("GPU:0",)),
            )
        ),
    ]
    for facts, prefer, devices, kind, names in named:
        with subtests.test(facts=facts):
            plan = choose(facts, prefer, devices)
            assert (plan.kind, plan.devices, plan.unmet) == (kind, names, ())
            assert plan.num_replicas == len(names) * (2 if kind == "multi_worker" else 1)


def test_what_cannot_be_named(subtests: pytest.Subtests) -> None:
    missing, refused = DeviceNotFoundError, StrategyUnavailableError
    others = "combined with the cluster.*CUDA_VISIBLE_DEVICES"
    gone = r"does not have GPU:1.*Existing: CPU:0, GPU:0.*Write \['CPU:0', 'GPU:0'\]"
    named: list[tuple[MachineInfo, str, Any, type[Exception], str]] = [
        (machine(4, 8), "auto", 8, missing, "Asked for 8 devices, but only 4 exist"),
        (machine(1), "auto", ["GPU:1"], missing, NO_GPU),
        *((machine(1), kind, ["GPU:0", "GPU:1"], missing, gone) for kind in ("auto", *KINDS[1:])),
        (machine(2), "auto", ["GPU:0", "CPU:0"], refused, "of one kind, GPUs or CPUs"),
        (machine(2), "one_device", 2, refused, r"GPU:0, GPU:1. Name one, devices=\['GPU:0'\]"),
        (machine(4, 2, cluster=TWO_WORKERS), "auto", ["GPU:1"], refused, others),
        (machine(4, 2, cluster=TWO_WORKERS), "auto", ["GPU:1", "GPU:0"], refused, others),
        (machine(0, 2, cluster=TWO_WORKERS), "auto", 2, refused, others),
        (machine(2, 2, cluster=TWO_WORKERS), "auto", ["CPU:0", "CPU:1"], refused, others),
    ]
    for facts, prefer, devices, error, said in named:
        with subtests.test(said), pytest.raises(error, match=said):
            choose(facts, prefer, devices)


@pytest.mark.parametrize(
    ("facts", "prefer", "devices", "kind", "said"),
    [
        (machine(0, 8), "auto", None, "mirrored", "prefer='mirrored' uses the logical CPUs"),
        (
            machine(4),
            "mirrored",
            ["/gpu:2"],
            "mirrored",
            "GPU:2 is the only device, and one device has nothing to mirror",
        ),
        (machine(2, cluster=ONE_WORKER), "auto", None, "multi_worker", "one worker"),
        (machine(2, tpu=TPU), "auto", 2, "tpu", "devices names GPU:0, GPU:1"),
    ],
    ids=str,
)
def test_why_a_kind_is_not_taken_is_said(
    facts: Any, prefer: Any, devices: Any, kind: Any, said: Any
) -> None:
    plan = choose(facts, prefer, devices)
    assert said in plan.rejected[kind]
    assert plan.unmet == (() if prefer == "auto" else (f"prefer='mirrored': {said}",))


def test_tpu_cores_are_counted_where_they_are_known() -> None:
    here = MachineInfo({"CPU:0": "CPU:0", "TPU:0": "TPU:0", "TPU:1": "TPU:1"}, Tpu("local", None))
    plan = choose(here)
    assert (plan.devices, plan.num_replicas) == (("TPU:0", "TPU:1"), 2)
    assert "a replica on each core of" in str(choose(machine(tpu=TPU)))


# communication ---------------------------------------------------------------------------------


NOT_OF_WORKERS = {"hierarchical_copy", "one_device"}
WAYS_TO_ADD: list[tuple[MachineInfo, str, str, set[str]]] = [
    (machine(2), "auto", "nccl", {"ring"}),
    (machine(3), "auto", "nccl", {"ring", "hierarchical_copy"}),
    (machine(2, parts=2), "auto", "one_device", {"nccl", "ring"}),
    (machine(4, parts=2), "auto", "one_device", {"nccl", "ring"}),
    (machine(2, nccl=False), "auto", "one_device", {"nccl", "ring"}),
    (machine(0), "auto", "none", {"nccl"}),
    (machine(0, cpus=2), "mirrored", "one_device", {"nccl", "ring"}),
    (machine(0, cpus=3), "mirrored", "one_device", {"nccl", "ring", "hierarchical_copy"}),
    (machine(2, cluster=TWO_WORKERS), "auto", "nccl", NOT_OF_WORKERS),
    (machine(2, parts=2, cluster=TWO_WORKERS), "auto", "ring", {"nccl", *NOT_OF_WORKERS}),
    (machine(0, cluster=TWO_WORKERS), "auto", "ring", {"nccl", *NOT_OF_WORKERS}),
    (machine(tpu=TPU), "auto", "tpu", {"nccl", "ring", *NOT_OF_WORKERS}),
    (machine(1), "auto", "none", set()),
]


def test_communication_is_what_works() -> None:
    wrong = []
    for (facts, prefer, best, impossible), asked in itertools.product(WAYS_TO_ADD, COMMUNICATIONS):
        plan = choose(facts, prefer, communication=asked)
        if asked in impossible:
            unmet = [one.partition(":")[0] for one in plan.unmet]
            right = (plan.communication, unmet) == (best, [f"communication={asked!r}"])
        else:
            taken = best if best in ("none", "tpu") or asked == "auto" else asked
            right = (plan.communication, plan.unmet) == (taken, ())
        if not right or not plan.communication_reason:
            wrong.append((facts, prefer, asked, plan))
    assert wrong == []


def test_why_not_is_said() -> None:
    def why(facts: MachineInfo, asked: str) -> str:
        return choose(facts, "mirrored", communication=asked).unmet[0]

    assert "parts of one physical GPU" in why(machine(2, parts=2), "nccl")
    assert "built without NCCL" in why(machine(2, nccl=False), "nccl")
    assert "leaves out the gradients of the last" in why(machine(3), "hierarchical_copy")
    assert "nccl, one_device, hierarchical_copy here" in why(machine(0, cpus=2), "ring")


# text ------------------------------------------------------------------------------------------


def test_the_plan_reads_well() -> None:
    refused = "NCCL runs on GPUs only, and these are CPUs: none is here; buy one"
    assert str(choose(machine(0, cpus=3), "mirrored", communication="nccl")).splitlines() == [
        "mirrored: 3 replicas on CPU:0, CPU:1, CPU:2",
        "  because there is no GPU: none is here; buy one; so on 3 logical CPUs",
        f"  gradients are added by one_device: {refused}",
        "  not tpu: prefer='mirrored' was requested",
        "  not multi_worker: prefer='mirrored' was requested",
        "  not one_device: mirrored comes first",
        f"  requested but unavailable: communication='nccl': {refused}",
    ]
    worker = choose(machine(2, cluster=TWO_WORKERS)).reason
    assert worker.startswith("this is worker 1 of 2 at b:1 (Cluster)")
    assert choose(machine(1)).reason == f"GPU:0 is the only GPU: {NO_GPU}"
    assert choose(machine(1, no_more_gpus=None)).reason == "GPU:0 is the only GPU"
