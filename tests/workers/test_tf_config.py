"""TF_CONFIG is read strictly: what TensorFlow hangs on, or takes for one machine, is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from each import each

from tfmultigpu.addons.workers.cluster import Cluster
from tfmultigpu.addons.workers.sources import cluster_from_environment
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


def test_without_tf_config_there_is_no_cluster() -> None:
    assert cluster_from_environment({}) is None


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert cluster_from_environment() is None
    monkeypatch.setenv("TF_CONFIG", "{}")
    with pytest.raises(ClusterError):
        cluster_from_environment()


def test_workers_in_their_order() -> None:
    cluster = read(task={"type": "worker", "index": 2})
    assert cluster.workers == tuple(WORKERS)
    assert (cluster.index, cluster.address) == (2, "10.0.0.3:2222")
    assert str(cluster) == "worker 2 of 3 at 10.0.0.3:2222 (TF_CONFIG)"


@each("chief", ["chief", "master"])
def test_the_chief_comes_first_and_master_is_chief(chief: str) -> None:
    jobs = {"worker": WORKERS[1:], chief: WORKERS[:1]}
    first = read(jobs, {"type": chief, "index": 0})
    assert first.workers == tuple(WORKERS)
    assert first.index == 0
    second = read(jobs, {"type": "worker", "index": 0})
    assert (second.index, second.address) == (1, WORKERS[1])


@each("inside", [True, False])
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


def test_what_kubeflow_sets_in_each_pod() -> None:
    """As the training operator writes it: no evaluator in the cluster, services for names."""
    jobs = {
        "chief": ["dist-chief-0.kubeflow.svc:2222"],
        "worker": ["dist-worker-0.kubeflow.svc:2222", "dist-worker-1.kubeflow.svc:2222"],
    }
    kinds = [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("evaluator", 0, None)]
    for kind, number, index in kinds:
        pod = read(jobs, {"type": kind, "index": number}, environment="cloud")
        assert (pod.index, len(pod.workers)) == (index, 3)
    # An older TFJob says master.
    assert read({"master": jobs["chief"]}, {"type": "master", "index": 0}).index == 0


def test_what_ray_train_sets_in_each_worker() -> None:
    jobs = {"worker": ["10.0.0.4:41235", "10.0.0.5:38127"]}
    second = read(jobs, {"type": "worker", "index": 1})
    assert (second.index, second.address) == (1, "10.0.0.5:38127")


def test_a_cluster_that_is_written_down() -> None:
    written = Cluster(workers=WORKERS, index=2)
    assert written.workers == tuple(WORKERS)
    assert str(written) == "worker 2 of 3 at 10.0.0.3:2222 (Cluster)"
    assert Cluster(WORKERS, None).address is None


@each(
    ("arguments", "message"),
    [
        ({"workers": []}, r"^Cluster: workers lists nobody\. It looks like Cluster\(workers=\["),
        ({"workers": "a:1"}, r"workers must be a list of addresses\..*Received: 'a:1'"),
        ({"workers": ["a:1", "b"]}, r"^Cluster: workers\[1\] must be host:port.*Received: 'b'"),
        ({"workers": ["a:1", "A:1"]}, r"workers\[1\] and workers\[0\] are the same address"),
        ({"index": 2}, r"index is out of range\. There are 2 workers: 0 to 1\. Received: 2"),
        ({"index": -1}, r"index is out of range.*Received: -1"),
        ({"index": "1"}, r"index must be a whole number\..*Received: '1'"),
        ({"index": True}, r"index must be a whole number"),
    ],
)
def test_what_is_wrong_in_a_written_cluster_is_named(arguments: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster(**{"workers": ["a:1", "b:1"], "index": 0, **arguments})


@each(
    ("text", "message"),
    [
        ("", r"TF_CONFIG: is not JSON\..*Unset TF_CONFIG to train alone\. Received: ''"),
        ("{'cluster': {}}", "TF_CONFIG: is not JSON"),
        ("[1, 2]", r"TF_CONFIG: must be a JSON object\. .*Received: '\[1, 2\]'"),
        ("null", r"must be a JSON object\. .*Received: 'null'"),
        ("{}", r'TF_CONFIG: has no "cluster"\. It looks like .*Received: \{\}'),
    ],
)
def test_what_is_no_description_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster_from_environment({"TF_CONFIG": text})


@each(
    ("cluster", "message"),
    [
        ({}, r'"cluster" must list the workers'),
        ([1], r'"cluster" must list the workers.*Received: \[1\]'),
        ({"worker": []}, r'"cluster" lists no worker'),
        ({"evaluator": ["a:1"]}, r'"cluster" lists no worker'),
        ({"worker": "a:1"}, r"cluster\.worker must be a list of addresses.*Received: 'a:1'"),
        ({"worker": {"1": "a:1"}}, r"cluster\.worker must be a list of addresses"),
        ({"workers": ["a:1"]}, r"unknown task type\. Known are.*Received: 'workers'"),
        ({"worker": ["a"]}, r"cluster\.worker\[0\] must be host:port\..*Received: 'a'"),
        ({"worker": ["a:1", "b:"]}, r"cluster\.worker\[1\] must be host:port"),
        ({"worker": ["a:1", ":2"]}, r"cluster\.worker\[1\] must be host:port"),
        ({"worker": ["a:1", 7]}, r"cluster\.worker\[1\] must be host:port.*Received: 7"),
        ({"worker": ["a:http"]}, r"cluster\.worker\[0\] must be host:port"),
        ({"worker": ["a:0"]}, r"cluster\.worker\[0\] must have a port from 1 to 65535"),
        ({"worker": ["a:70000"]}, r"must have a port from 1 to 65535.*Received: 'a:70000'"),
        (
            {"worker": ["http://a:1"]},
            r'cluster\.worker\[0\] must be host:port, without a scheme\. Write "a:1"\.',
        ),
        ({"worker": ["grpc://a:1/"]}, r'without a scheme\. Write "a:1"'),
        (
            {"worker": ["a:1", "b:1", "A:1"]},
            r"cluster\.worker\[2\] and cluster\.worker\[0\] are the same address.*'A:1'",
        ),
        (
            {"chief": ["a:1"], "worker": ["a:1"]},
            r"cluster\.worker\[0\] and cluster\.chief\[0\] are the same address",
        ),
        ({"chief": ["a:1", "b:1"]}, r"cluster\.chief must have one address"),
        ({"chief": ["a:1"], "master": ["b:1"]}, r'both "chief" and "master"'),
        ({"worker": ["a:1"], "ps": ["b:1"]}, r'"cluster" has "ps"\. Parameter servers are not s'),
    ],
)
def test_what_is_wrong_in_the_cluster_is_named(cluster: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        read(cluster)
    assert str(caught.value).startswith("TF_CONFIG: ")


@each(
    ("task", "message"),
    [
        ([], r'"task" must be an object'),
        ({"index": 0}, r"task\.type is missing"),
        ({"type": "worker"}, r"task\.index is missing"),
        ({"type": "chief", "index": 0}, r"task\.type is not in the cluster\. It has worker"),
        ({"type": ["worker"], "index": 0}, r"task\.type is not in the cluster"),
        ({"type": "ps", "index": 0}, r'task\.type is "ps"\. Parameter servers are not supp'),
        ({"type": "worker", "index": 3}, r"out of range\. cluster\.worker has 3 addresses: 0 to 2"),
        ({"type": "worker", "index": -1}, r"task\.index is out of range.*Received: -1"),
        ({"type": "evaluator", "index": -1}, r"task\.index is out of range.*Received: -1"),
        ({"type": "worker", "index": True}, r"task\.index must be a whole number.*: True"),
        ({"type": "worker", "index": 0.5}, r"task\.index must be a whole number.*: 0\.5"),
        ({"type": "worker", "index": None}, r"task\.index must be a whole number"),
    ],
)
def test_what_is_wrong_in_the_task_is_named(task: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read(task=task)


def test_a_missing_task_is_named() -> None:
    text = json.dumps({"cluster": {"worker": WORKERS}})
    with pytest.raises(ClusterError, match=r'TF_CONFIG: has no "task"\. Every process needs to'):
        cluster_from_environment({"TF_CONFIG": text})


def test_a_sparse_cluster_is_declined() -> None:
    with pytest.raises(ClusterError, match=r'has "sparseCluster"\. .*enableDynamicWorker'):
        read(sparseCluster={"worker": {"0": "a:1"}})


def test_another_rpc_layer_is_declined() -> None:
    with pytest.raises(ClusterError, match=r'"rpc_layer" must be "grpc".*Received: .grpc\+loas'):
        read(rpc_layer="grpc+loas")
