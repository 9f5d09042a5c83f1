"""A scheduler is one object: whoever needs to know something of it asks it."""

from __future__ import annotations

import errno
from collections.abc import Mapping

import pytest

from tfmultigpu.addons.diagnostics.machine import Machine
from tfmultigpu.addons.diagnostics.machine_checks import find_causes
from tfmultigpu.addons.diagnostics.report import describe_variables, redact
from tfmultigpu.addons.workers import channels, sources
from tfmultigpu.addons.workers.processes import worker_environment
from tfmultigpu.clusters import Cluster, Scheduler
from tfmultigpu.strategies.plan import MachineInfo, choose

JOB = {"ANTS_HOSTS": "ada,bob", "ANTS_RANK": "1", "ANTS_JOB": "7", "ANTS_COUNT": "2"}


class Ants(Scheduler):
    name = "Ants"
    variables = ("ANTS_RANK",)
    shown = ("ANTS_COUNT",)
    secret = ("ANTS_HOSTS",)
    port_advice = "Ask the queen for another port."

    def described_by(self, environ: Mapping[str, str]) -> str:
        return "ANTS_COUNT" if environ.get("ANTS_COUNT", "1") != "1" else ""

    def job_id(self, environ: Mapping[str, str]) -> str:
        return environ.get("ANTS_JOB", "")

    def read(self, environ: Mapping[str, str]) -> Cluster | None:
        if "ANTS_RANK" not in environ:
            return None
        hosts = [f"{host}:2222" for host in environ["ANTS_HOSTS"].split(",")]
        return Cluster(hosts, int(environ["ANTS_RANK"]), source=self.name)

    def why_not(self, environ: Mapping[str, str]) -> str:
        return "no ant started this process"


@pytest.fixture(autouse=True)
def with_ants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SCHEDULERS", (*sources.SCHEDULERS, Ants()))


def test_a_cluster_is_read_and_its_job_told_apart() -> None:
    cluster = sources.cluster_from_environment(JOB)
    assert str(cluster) == "worker 1 of 2 at bob:2222 (Ants)"
    assert sources.why_no_cluster({}) == "TF_CONFIG is not set; no ant started this process"
    assert sources.job_id(JOB) == "7"
    assert sources.job_id({**JOB, "SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "9"}) == "9"
    assert (
        sources.job_id({**JOB, "SLURM_JOB_ID": "8", "TFMULTIGPU_JOB_ID": "launched"}) == "launched"
    )


def test_workers_of_the_launcher_do_not_join_the_job() -> None:
    assert "ANTS_RANK" not in worker_environment(["127.0.0.1:1"], 0, JOB)


def test_a_taken_port_is_told_with_its_advice() -> None:
    taken = OSError(errno.EADDRINUSE, "in use")
    by_hand = Cluster(["ada:2222"], 0)
    for cluster, advice in (
        (sources.cluster_from_environment(JOB), Ants.port_advice),
        (by_hand, "Correct the index of this worker, or the list, in Cluster on every worker."),
    ):
        assert cluster is not None
        assert channels._cannot_listen(cluster, taken).write == advice


def test_doctor_shows_what_is_not_secret_and_says_what_is_not_used() -> None:
    assert describe_variables(JOB) == {"ANTS_COUNT": "'2'", "ANTS_HOSTS": "set (not shown)"}
    assert "ada" not in redact("from ada,bob on", JOB)
    plan = choose(MachineInfo({"CPU:0": "CPU:0"}))
    (finding,) = find_causes(Machine(environment=JOB, plan=plan))
    assert finding.what.startswith("ANTS_COUNT is set and not used")
