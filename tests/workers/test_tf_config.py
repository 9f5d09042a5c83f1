"""TF_CONFIG is read strictly: what TensorFlow hangs on, or takes for one machine, is an error."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from tfmultigpu.addons.workers.sources import cluster_from_environment, why_no_cluster
from tfmultigpu.clusters import Cluster
from tfmultigpu.errors import ClusterError

WORKERS = ["a.example:2222", "b.example:2222", "10.0.0.3:2222"]


def read(cluster: Any = None, task: Any = None, **more: Any) -> Cluster:
    config = {
        "cluster": {"worker": WORKERS} if cluster is None else cluster,
        "task": {"type": "worker", "index": 0} if task is None else task,
        **more,
    }
    found = cluster_from_environment({"TF_CONFIG": json.dumps(config)})
    assert found is not None
    return found


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert cluster_from_environment() is None
    assert why_no_cluster({}) == "TF_CONFIG is not set"
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(ClusterError):
        cluster_from_environment()
    assert why_no_cluster().startswith("TF_CONFIG: is not JSON")


def test_workers_in_their_order() -> None:
    cluster = read(task={"type": "worker", "index": 2})
    assert cluster.workers == tuple(WORKERS)
    assert (cluster.index, cluster.address) == (2, "10.0.0.3:2222")
    assert str(cluster) == "worker 2 of 3 at 10.0.0.3:2222 (TF_CONFIG)"
    assert pickle.loads(pickle.dumps(cluster)) == cluster


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_the_chief_comes_first_and_master_is_chief(chief: str) -> None:
    jobs = {"worker": WORKERS[1:], chief: WORKERS[:1]}
    first = read(jobs, {"type": chief, "index": 0})
    assert first.workers == tuple(WORKERS)
    assert first.index == 0
    second = read(jobs, {"type": "worker", "index": 0})
    assert (second.index, second.address) == (1, WORKERS[1])


@pytest.mark.parametrize("inside", [True, False])
def test_the_evaluator_is_beside_the_workers(inside: bool) -> None:
    jobs = {"worker": WORKERS, **({"evaluator": ["e:1"]} if inside else {})}
    evaluator = read(jobs, {"type": "evaluator", "index": 0})
    assert (evaluator.index, evaluator.address) == (None, None)
    assert evaluator.workers == tuple(WORKERS)


def test_what_others_add_is_left_alone() -> None:
    vertex = read(
        {"chief": ["127.0.0.1:2222"]},
        {"type": "chief", "index": 0, "trial": "1"},
        environment="cloud",
        job={"x": 1},
        rpc_layer="grpc",
    )
    assert vertex.workers == ("127.0.0.1:2222",)
    assert read(task={"type": "worker", "index": "1"}).index == 1
    assert read({"worker": ["[::1]:2222", "[fe80::1]:2222"]}).address == "[::1]:2222"


# tests/lines have more of them, which reach plan_strategy.
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cluster", [1], r'must be a JSON object with an object "cluster"'),
        ("cluster", {"worker": [], "evaluator": "a:1"}, r"cluster\.evaluator must be a list"),
        ("cluster", {"workers": ["a:1"]}, r"unknown task type\. Received: 'workers'\. Known are"),
        ("cluster", {"worker": ["a:1", 7]}, r"workers\[1\] must be host:port.*Received: 7"),
        ("cluster", {"worker": ["a:70000"]}, r"Received: 'a:70000'\. .*the port below 65536\."),
        ("cluster", {"worker": ["a:1", "b:1", "A:1"]}, r"workers\[2\] is listed twice.*'A:1'"),
        ("cluster", {"chief": ["a:1"], "worker": ["a:1"]}, r"workers\[1\] is listed twice"),
        ("cluster", {"chief": ["a:1"], "master": ["b:1"]}, r"must have one chief"),
        ("task", {"index": 0}, r"task\.type is not in the cluster\..*Received: None"),
        ("task", {"type": ["worker"], "index": 0}, r"task\.type is not in the cluster"),
        ("task", {"type": "ps", "index": 0}, r"task\.type is not in .* Parameter servers \(ps\)"),
        ("task", {"type": "worker", "index": True}, r"not a whole number.*: True"),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_field_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        read(**{field: value})
    assert str(caught.value).startswith("TF_CONFIG: ")
