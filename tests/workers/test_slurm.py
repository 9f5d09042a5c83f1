"""Slurm: hosts in its own order, tasks where it put them, and every contradiction named."""

from __future__ import annotations

from typing import Any

import pytest

from tfmultigpu.addons.workers.slurm import Slurm
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
}


def task(**changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**TASK, **changes}.items() if value is not None}


def test_tasks_are_workers_where_slurm_put_them() -> None:
    cluster = Slurm().read(task())
    assert cluster is not None
    assert cluster.index == 3
    hosts, ports = zip(*(one.split(":") for one in cluster.workers), strict=True)
    assert hosts == ("n9", "n9", "n10", "n10", "n11")
    first = int(ports[0])
    assert [int(port) - first for port in ports] == [0, 1, 0, 1, 0]
    assert 10240 <= first < 32768
    assert str(cluster) == f"worker 3 of 5 at n10:{first + 1} (Slurm)"


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    def ports(**changes: str) -> set[str]:
        cluster = Slurm().read(task(**changes))
        assert cluster is not None
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "5"}, r"^Slurm: index is out of range\. .*0 to 4\. Received: 5"),
        ({"SLURM_PROCID": "x"}, r"'x'\. Received: .* Start the program with srun"),
        ({"SLURM_PROCID": "9" * 5000}, r"'SLURM_PROCID': '9999"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, r'Invalid hostlist format "n\[1-"'),
        ({"SLURM_STEP_NODELIST": "n[3-1]"}, r"5 tasks on 0 nodes, and not 5 tasks on 3 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, r"Invalid tasks-per-node list format"),
        ({"TFMULTIGPU_PORT": "65535"}, r"workers\[1\] must be host:port.*Received: 'n9:65536'"),
        ({"TFMULTIGPU_PORT": "auto"}, r"'TFMULTIGPU_PORT': 'auto'"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Slurm().read(task(**changes))
