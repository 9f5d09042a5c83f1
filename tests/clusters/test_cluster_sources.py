"""A new scheduler is one source: reading, errors, ports, jobs and the launcher follow from it."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Mapping

import pytest
from each import each

from tfmultigpu.addons.diagnostics.environment import describe_variables, redact
from tfmultigpu.addons.workers.jobs import read_job
from tfmultigpu.addons.workers.ports import listen
from tfmultigpu.addons.workers.preflight import preflight
from tfmultigpu.addons.workers.processes import free_addresses, worker_environment
from tfmultigpu.addons.workers.sources import SOURCES, cluster_from_environment, why_no_cluster
from tfmultigpu.addons.workers.spec import WRITTEN, Cluster, ClusterSource
from tfmultigpu.errors import ClusterError


def read_flotilla(environ: Mapping[str, str]) -> Cluster | None:
    if "FLOTILLA_SHIPS" not in environ:
        return None
    return Cluster(environ["FLOTILLA_SHIPS"].split(), int(environ["FLOTILLA_ME"]), source=FLOTILLA)


FLOTILLA = ClusterSource(
    "Flotilla",
    read=read_flotilla,
    why_absent=lambda environ: "the fleet is at anchor" if "FLOTILLA" in environ else None,
    job_id=lambda environ: environ.get("FLOTILLA_VOYAGE"),
    same="FLOTILLA_SHIPS",
    own="FLOTILLA_ME",
    start="flotilla sail train.py",
    other_port="set FLOTILLA_PORT",
    variables=("FLOTILLA_SHIPS", "FLOTILLA_ME"),
)
ALL = (*SOURCES, FLOTILLA)
SHIP = {"FLOTILLA_SHIPS": "a:1 b:1", "FLOTILLA_ME": "1"}


def test_the_reader_asks_every_source_in_order() -> None:
    found = cluster_from_environment(SHIP, sources=ALL)
    assert found == Cluster(["a:1", "b:1"], 1, source=FLOTILLA)
    assert str(found) == "worker 1 of 2 at b:1 (Flotilla)"
    other = '{"cluster": {"worker": ["c:1"]}, "task": {"type": "worker", "index": 0}}'
    both = {**SHIP, "TF_CONFIG": other}
    assert str(cluster_from_environment(both, sources=ALL)).endswith("(TF_CONFIG)")
    assert str(cluster_from_environment(both, sources=ALL[::-1])).endswith("(Flotilla)")
    assert cluster_from_environment(SHIP) is None


def test_a_source_says_why_it_has_no_cluster() -> None:
    assert why_no_cluster({"FLOTILLA": "1"}, sources=ALL) == (
        "TF_CONFIG is not set; the fleet is at anchor: flotilla sail train.py"
    )
    assert why_no_cluster({}, sources=ALL) == "TF_CONFIG is not set"
    assert why_no_cluster({}, sources=()) == "nothing describes one"


@each(
    "source",
    [*SOURCES, WRITTEN],
)
def test_a_cluster_can_be_sent_to_another_process(source: ClusterSource) -> None:
    cluster = Cluster(["a:1", "b:1"], 1, source=source)
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert repr(cluster).endswith(f"source=ClusterSource(name='{source}'))")


def test_errors_name_the_source() -> None:
    with pytest.raises(ClusterError, match=r"^Flotilla: workers\[1\] must be host:port"):
        cluster_from_environment({**SHIP, "FLOTILLA_SHIPS": "a:1 b"}, sources=ALL)


def test_a_taken_port_is_changed_in_the_way_of_the_source() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError, match=r"is taken by another .*, or set FLOTILLA_PORT\."):
            listen(address, FLOTILLA)
        plain = ClusterSource("Armada")
        with pytest.raises(ClusterError, match=r"or list another port in Armada on every worker"):
            listen(address, plain)


def test_workers_that_disagree_are_told_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfmultigpu.addons.workers import preflight as module

    given: dict[str, object] = {}
    monkeypatch.setattr(module, "meet", lambda *args, **named: given.update(named))
    monkeypatch.setenv("FLOTILLA_VOYAGE", "around the world")
    for name in ("SLURM_JOB_ID", "SLURM_HET_JOB_ID", "TFMULTIGPU_JOB_ID", "TFMULTIGPU_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)
    cluster = Cluster(free_addresses(2), 0, source=FLOTILLA)
    preflight(cluster, devices="1 CPU", communication="ring", timeout=1.0)
    cures, job = given["cures"], given["job"]
    assert isinstance(cures, dict)
    assert cures["the cluster"] == (
        "Give every worker the same FLOTILLA_SHIPS; only FLOTILLA_ME differs."
    )
    assert job == read_job({"FLOTILLA_VOYAGE": "around the world"}, ALL)


def test_the_name_of_the_job_comes_from_the_first_source_that_knows_it() -> None:
    known = {"FLOTILLA_VOYAGE": "home", "SLURM_JOB_ID": "7"}
    assert read_job(known, ALL).id == "Slurm job 7"
    assert read_job(known, ALL[::-1]).id == "home"
    assert read_job(known, ()).id is None
    assert read_job({"SLURM_HET_JOB_ID": "6", "SLURM_JOB_ID": "7"}, SOURCES).id == "Slurm job 6"


def test_the_launcher_and_reports_know_the_variables_of_all_sources() -> None:
    told = {name: "gpu-7.example" for source in SOURCES for name in source.variables}
    assert "TF_CONFIG" in told
    assert "SLURM_PROCID" in told
    assert worker_environment(["127.0.0.1:1"], 0, {**told, "HOME": "/root"}) == {"HOME": "/root"}
    for source in SOURCES:
        assert set(source.shown) <= set(describe_variables(dict.fromkeys(source.shown, "1")))
        for name in source.hosts:
            assert redact("on gpu-7.example now", {name: "gpu-7.example"}) == "on <not shown> now"
    assert [source.is_present(SHIP) for source in ALL] == [False, False, True]
