"""A new scheduler is one source: a function that reads it, and its variables."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest

from tfmultigpu.addons.workers import Cluster, ClusterSource, cluster_from_environment
from tfmultigpu.addons.workers.processes import worker_environment
from tfmultigpu.addons.workers.sources import SOURCES, why_no_cluster
from tfmultigpu.errors import ClusterError

SHIP = {"SHIPS": "a:1 b:1", "SHIP": "1"}


def read_flotilla(environ: Mapping[str, str]) -> Cluster | str:
    if "SHIPS" not in environ:
        return "the fleet is at anchor"
    return Cluster(environ["SHIPS"].split(), int(environ["SHIP"]), source="Flotilla")


ALL = (*SOURCES, ClusterSource("Flotilla", read_flotilla, ("SHIPS", "SHIP")))


def test_every_source_is_asked_in_order() -> None:
    cluster = cluster_from_environment(SHIP, sources=ALL)
    assert cluster == Cluster(["a:1", "b:1"], 1, source="Flotilla")
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    other = '{"cluster": {"worker": ["c:1"]}, "task": {"type": "worker", "index": 0}}'
    both = {**SHIP, "TF_CONFIG": other}
    assert str(cluster_from_environment(both, sources=ALL)).endswith("(TF_CONFIG)")
    assert str(cluster_from_environment(both, sources=ALL[::-1])).endswith("(Flotilla)")
    assert cluster_from_environment(SHIP) is None
    with pytest.raises(ClusterError, match=r"^Flotilla: workers\[1\] must be host:port"):
        cluster_from_environment({**SHIP, "SHIPS": "a:1 b"}, sources=ALL)


def test_why_there_is_none_is_said_and_never_raises() -> None:
    assert why_no_cluster({}) == "TF_CONFIG is not set"
    assert why_no_cluster({"TF_CONFIG": "{"}).startswith("TF_CONFIG: is not JSON")


def test_workers_of_the_launcher_are_in_no_other_cluster() -> None:
    variables = {name: "1" for source in SOURCES for name in source.variables}
    assert worker_environment(["127.0.0.1:1"], 0, {**variables, "HOME": "/"}) == {"HOME": "/"}
