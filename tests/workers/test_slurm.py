"""Slurm: hosts in its own order, tasks where it put them, and every contradiction named."""

from __future__ import annotations

from typing import Any

import pytest
from each import each

from tfmultigpu.addons.workers.slurm import expand_hosts, read_slurm
from tfmultigpu.addons.workers.sources import cluster_from_environment, why_no_cluster
from tfmultigpu.errors import ClusterError

# What srun sets in task 3 of `srun --nodes=3 --ntasks=5`, on nodes without GPUs.
TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[9-11]",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[9-11]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_DISTRIBUTION": "block",
}


def task(**changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**TASK, **changes}.items() if value is not None}


@each(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("b[2-3],a1,c[098-101]", ["b2", "b3", "a1", "c098", "c099", "c100", "c101"]),
        ("rack[1-2]-node[1,3].example.org", [
            "rack1-node1.example.org", "rack1-node3.example.org",
            "rack2-node1.example.org", "rack2-node3.example.org",
        ]),
        ("gpu-a-1,gpu_b.2", ["gpu-a-1", "gpu_b.2"]),
    ],
)  # fmt: skip
def test_lists_of_hosts_are_written_out_in_their_order(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@each("text", ["", ",", "n[1-", "n[3-1]", "n[a]", "n]1", "n[]", "n 1"])
def test_what_is_no_list_of_hosts_is_named(text: str) -> None:
    with pytest.raises(ClusterError, match=r"SLURM_STEP_NODELIST is not of the form") as caught:
        list(expand_hosts(text))
    assert str(caught.value).endswith(f"Received: SLURM_STEP_NODELIST={text!r}")


def test_tasks_are_workers_where_slurm_put_them() -> None:
    cluster = read_slurm(task())
    assert not isinstance(cluster, str)
    assert cluster.index == 3
    hosts, ports = zip(*(one.split(":") for one in cluster.workers), strict=True)
    assert hosts == ("n9", "n9", "n10", "n10", "n11")
    first = int(ports[0])
    assert [int(port) - first for port in ports] == [0, 1, 0, 1, 0]
    assert 10240 <= first < 32768
    assert str(cluster) == f"worker 3 of 5 at n10:{first + 1} (Slurm)"


def test_tasks_that_are_dealt_out_in_turn() -> None:
    cluster = read_slurm(task(SLURM_DISTRIBUTION="cyclic", SLURM_NODEID="0"))
    assert not isinstance(cluster, str)
    assert [one.split(":")[0] for one in cluster.workers] == ["n9", "n10", "n11", "n9", "n10"]


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    def ports(**changes: str) -> set[str]:
        cluster = read_slurm(task(**changes))
        assert not isinstance(cluster, str)
        return {one.split(":")[1] for one in cluster.workers}

    assert not ports() & ports(SLURM_JOB_ID="4712")
    assert not ports() & ports(SLURM_STEP_ID="1")
    assert ports() == ports(SLURM_PROCID="0", SLURM_NODEID="0")
    assert ports(TFMULTIGPU_PORT="2222") == {"2222", "2223"}


def test_tf_config_comes_first_and_one_task_needs_no_cluster() -> None:
    config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    cluster = cluster_from_environment(task(TF_CONFIG=config))
    assert cluster is not None
    assert cluster.source == "TF_CONFIG"
    assert cluster_from_environment(task(SLURM_STEP_NUM_TASKS="1")) is None


def test_a_job_script_that_forgot_srun_is_told() -> None:
    script = task(SLURM_STEP_NUM_TASKS=None, SLURM_STEP_NODELIST=None, SLURM_PROCID="0")
    assert cluster_from_environment(script) is None
    assert why_no_cluster(script) == (
        "TF_CONFIG is not set; the Slurm job has 5 tasks, but srun did not start this process: "
        "srun python train.py"
    )
    assert why_no_cluster({"SLURM_NTASKS": "1"}) == "TF_CONFIG is not set"


@each(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "5"}, r"^Slurm: SLURM_PROCID is not below the number of tasks, 5\."),
        ({"SLURM_PROCID": "x"}, r"SLURM_PROCID must be a whole number.*SLURM_PROCID='x'"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, r"SLURM_STEP_NUM_TASKS must be a whole number"),
        ({"SLURM_STEP_NODELIST": None}, r"SLURM_STEP_NODELIST is not set, which srun sets for"),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, r"SLURM_STEP_TASKS_PER_NODE is not set"),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2x2"},
            r'is not of the form "2\(x3\),1"\. Received: SLURM_S',
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, r"is 5 tasks on 1 nodes\. There are 5 on 3\."),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, r"is 6 tasks on 3 nodes\. There are 5 on 3"),
        (
            {"SLURM_NODEID": "2"},
            r"task 3, which is node 1\..*srun --distribution=block",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x9)"}, r"is 9 tasks on 9 nodes"),
        ({"SLURM_PROCID": "9" * 5000}, r"SLURM_PROCID must be a whole number"),
        ({"SLURM_JOB_ID": None}, r"SLURM_JOB_ID is not set"),
        ({"TFMULTIGPU_PORT": "65534"}, r"TFMULTIGPU_PORT leaves no room for 2 ports below 65536"),
        ({"TFMULTIGPU_PORT": "auto"}, r"TFMULTIGPU_PORT must be a whole number"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read_slurm(task(**changes))
