"""The decision, as truth tables over machines that need not exist."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tfmultigpu.addons.workers.cluster import Cluster
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
    {"gpus": gpus, "cpus": cpus, "tpu": tpu, "cluster": cluster}
    for gpus in (0, 1, 2, 8, 16)
    for cpus in (1, 8)
    for tpu in (NO_TPU, TPU)
    for cluster in (None, ONE_WORKER, TWO_WORKERS, EVALUATOR)
]


def parts_of(facts: dict[str, Any]) -> tuple[int, Tpu, Cluster | None]:
    return facts["gpus"], facts["tpu"], facts["cluster"]


def gpu_names(count: int) -> tuple[str, ...]:
    return tuple(f"GPU:{index}" for index in range(count))


def test_auto_follows_the_order() -> None:
    """Of every machine: a TPU, workers, all GPUs, one GPU, the CPU."""
    wrong = []
    for facts in MACHINES:
        plan, (gpus, tpu, cluster) = choose(machine(**facts)), parts_of(facts)
        if tpu is TPU:
            expected = ("tpu", ("grpc://10.0.0.2:8470",), None)
        elif cluster is TWO_WORKERS:
            expected = ("multi_worker", gpu_names(gpus) or ("CPU:0",), 2 * max(gpus, 1))
        elif gpus > 1:
            expected = ("mirrored", gpu_names(gpus), gpus)
        else:
            expected = ("one_device", ("GPU:0" if gpus else "CPU:0",), 1)
        rejected = [kind for kind in KINDS if kind != expected[0]]
        if (
            (plan.kind, plan.devices, plan.num_replicas) != expected
            or plan.unmet
            or list(plan.rejected) != rejected
            or not all(plan.rejected.values())
        ):
            wrong.append((facts, plan))
    assert wrong == []


def test_what_is_preferred_is_taken_or_named_as_unmet() -> None:
    wrong = []
    for facts, prefer in itertools.product(MACHINES, KINDS):
        plan, (gpus, tpu, cluster) = choose(machine(**facts), prefer), parts_of(facts)
        possible = {
            "tpu": tpu is TPU,
            "multi_worker": cluster in (ONE_WORKER, TWO_WORKERS),
            "mirrored": gpus > 1 or (gpus == 0 and facts["cpus"] > 1),
            "one_device": True,
        }
        if possible[prefer]:
            right = (plan.kind, plan.unmet) == (prefer, ())
        else:
            right = plan.unmet == (f"prefer={prefer!r}: {plan.rejected[prefer]}",)
        if not right or KINDS.index(plan.kind) < KINDS.index(prefer):
            wrong.append((facts, prefer, plan))
    assert wrong == []


def test_several_logical_cpus_are_used_only_when_asked_for() -> None:
    facts = machine(0, cpus=8)
    assert "prefer='mirrored' uses the logical CPUs" in choose(facts).rejected["mirrored"]
    assert choose(facts, "mirrored").num_replicas == 8
    assert choose(facts, devices=4).devices == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
    assert choose(facts, devices=["CPU:6", "cpu:1"]).devices == ("CPU:6", "CPU:1")


def test_one_device_named_is_one_device() -> None:
    why = "GPU:2 is the only device, and one device has nothing to mirror"
    for prefer, unmet in (("auto", ()), ("mirrored", (f"prefer='mirrored': {why}",))):
        plan = choose(machine(4), prefer, devices=["/gpu:2"])
        assert (plan.kind, plan.devices, plan.unmet) == ("one_device", ("GPU:2",), unmet)
        assert plan.rejected["mirrored"] == why


def test_a_count_means_gpus_where_there_are_any() -> None:
    assert choose(machine(4, cpus=8), devices=2).devices == gpu_names(2)
    with pytest.raises(DeviceNotFoundError, match="Asked for 8 devices, but only 4 exist"):
        choose(machine(4, cpus=8), devices=8)


def test_a_missing_device_is_an_error_whatever_is_preferred() -> None:
    for prefer in ("auto", "multi_worker", "mirrored", "one_device"):
        with pytest.raises(DeviceNotFoundError) as caught:
            choose(machine(1), prefer, devices=["GPU:0", "GPU:1"])
        assert "but not here: GPU:1" in str(caught.value)
        assert "Existing: CPU:0, GPU:0" in str(caught.value)
        assert "Write ['CPU:0', 'GPU:0']" in str(caught.value)


def test_cpus_and_gpus_are_not_mixed() -> None:
    with pytest.raises(StrategyUnavailableError) as caught:
        choose(machine(2), devices=["GPU:0", "CPU:0"])
    assert "of one kind, GPUs or CPUs" in str(caught.value)


def test_one_device_of_two_named_is_a_contradiction() -> None:
    with pytest.raises(
        StrategyUnavailableError, match=r"names GPU:0, GPU:1. Name one, devices=\['GPU:0'\]"
    ):
        choose(machine(2), "one_device", devices=["GPU:0", "GPU:1"])


def test_workers_bring_the_first_devices() -> None:
    bring: list[tuple[int, Any, tuple[str, ...]]] = [
        (0, None, ("CPU:0",)),
        (0, 1, ("CPU:0",)),
        (2, ["CPU:0"], ("CPU:0",)),
        (4, None, gpu_names(4)),
        (4, 2, gpu_names(2)),
        (4, ["GPU:0"], ("GPU:0",)),
    ]
    for gpus, devices, local in bring:
        plan = choose(machine(gpus, cpus=8, cluster=TWO_WORKERS), devices=devices)
        assert (plan.kind, plan.devices, plan.num_replicas) == (
            *("multi_worker", local),
            2 * len(local),
        )
        assert plan.reason.startswith("this is worker 1 of 2 at b:1 (Cluster)")


def test_workers_cannot_bring_others() -> None:
    others: list[tuple[int, Any]] = [
        (4, ["GPU:1"]),
        (4, ["GPU:1", "GPU:0"]),
        (0, 2),
        (2, ["CPU:0", "CPU:1"]),
    ]
    for gpus, devices in others:
        with pytest.raises(StrategyUnavailableError, match="combined with the cluster") as no:
            choose(machine(gpus, cpus=2, cluster=TWO_WORKERS), devices=devices)
        assert "CUDA_VISIBLE_DEVICES" in str(no.value), (gpus, devices)


def test_a_cluster_of_one_trains_alone_unless_asked() -> None:
    facts = machine(2, cluster=ONE_WORKER)
    assert choose(facts).kind == "mirrored"
    assert "one worker" in choose(facts).rejected["multi_worker"]
    assert choose(facts, "multi_worker").kind == "multi_worker"


def test_tpu_cores_are_counted_where_they_are_known() -> None:
    here = MachineInfo({"CPU:0": "CPU:0", "TPU:0": "TPU:0", "TPU:1": "TPU:1"}, Tpu("local", None))
    assert choose(here).devices == ("TPU:0", "TPU:1")
    assert choose(here).num_replicas == 2
    far = choose(machine(tpu=TPU))
    assert (far.devices, far.num_replicas) == (("grpc://10.0.0.2:8470",), None)
    assert "a replica on each core of" in str(far)
    assert choose(machine(2, tpu=TPU), devices=2).rejected["tpu"] == "devices names GPU:0, GPU:1"


# communication ---------------------------------------------------------------------------------


WAYS_TO_ADD: list[tuple[MachineInfo, str, str, set[str]]] = [
    (machine(2), "auto", "nccl", {"ring"}),
    (machine(3), "auto", "nccl", {"ring", "hierarchical_copy"}),
    (machine(2, parts=2), "auto", "one_device", {"nccl", "ring"}),
    (machine(4, parts=2), "auto", "one_device", {"nccl", "ring"}),
    (machine(2, nccl=False), "auto", "one_device", {"nccl", "ring"}),
    (machine(0, cpus=2), "mirrored", "one_device", {"nccl", "ring"}),
    (machine(0, cpus=3), "mirrored", "one_device", {"nccl", "ring", "hierarchical_copy"}),
    (machine(2, cluster=TWO_WORKERS), "auto", "nccl", {"hierarchical_copy", "one_device"}),
    (
        machine(2, parts=2, cluster=TWO_WORKERS),
        "auto",
        "ring",
        {"nccl", "hierarchical_copy", "one_device"},
    ),
    (
        machine(0, cluster=TWO_WORKERS),
        "auto",
        "ring",
        {"nccl", "hierarchical_copy", "one_device"},
    ),
    (
        machine(tpu=TPU),
        "auto",
        "tpu",
        {"nccl", "ring", "hierarchical_copy", "one_device"},
    ),
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

    assert "GPUs only" in why(machine(0, cpus=2), "nccl")
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
    assert choose(machine(1)).reason == f"GPU:0 is the only GPU: {NO_GPU}"
    assert choose(machine(1, no_more_gpus=None)).reason == "GPU:0 is the only GPU"
    with pytest.raises(DeviceNotFoundError, match=r"none is here; buy one"):
        choose(machine(1), devices=["GPU:1"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefer", "gpu"), ("prefer", ["GPU:0"]), ("prefer", 2), ("communication", "NCCL")],
)
def test_unknown_choices_are_refused_with_the_line(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of auto, .*Received: {name}="):
        choose(machine(1), **{name: value})
