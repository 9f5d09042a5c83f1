"""``TF_CONFIG``, read strictly.

Descriptions that TensorFlow takes for one machine, or hangs on, are errors here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfmultigpu.clusters import Cluster, Scheduler
from tfmultigpu.errors import ClusterError

_EXAMPLE = (
    'It looks like {"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_KNOWN = (
    "Known are chief, worker and evaluator. Parameter servers (ps) are not supported: under "
    "TensorFlow's strategy for them updates are not those of one device. List the machines under "
    '"worker" instead'
)


class TfConfig(Scheduler):
    """The scheduler that writes ``TF_CONFIG``: Kubeflow, Vertex AI, Ray Train, a person, ours."""

    name = "TF_CONFIG"
    variables = ("TF_CONFIG",)
    shown = ()
    secret = ("TF_CONFIG",)
    port_advice = "Correct the index of this worker, or the list, in TF_CONFIG on every worker."

    def described_by(self, environ: Mapping[str, str]) -> str:
        """Returns ``TF_CONFIG`` if it is set."""
        return "TF_CONFIG" if environ.get("TF_CONFIG") else ""

    def job_id(self, environ: Mapping[str, str]) -> str:
        """Returns the number that our launcher gives; others write none."""
        return environ.get("TFMULTIGPU_JOB_ID", "")

    def read(self, environ: Mapping[str, str]) -> Cluster | None:
        """Reads the cluster."""
        text = environ.get("TF_CONFIG")
        if text is None:
            return None
        return _read(text)

    def why_not(self, environ: Mapping[str, str]) -> str:
        """Returns that the variable is not set."""
        return "TF_CONFIG is not set"


def _read(text: str) -> Cluster:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("is not JSON", text, f"{error}. Unset TF_CONFIG to train alone") from error
    for name in ("cluster", "task"):
        if not isinstance(config, dict) or not isinstance(config.get(name), dict):
            raise _wrong(f'must be a JSON object with an object "{name}"', config)
    if "sparseCluster" in config:
        cure = "TensorFlow would train alone. Remove enableDynamicWorker from Kubeflow's TFJob"
        raise _wrong('has "sparseCluster"', config["sparseCluster"], cure)
    if config.get("rpc_layer", "grpc") != "grpc":
        raise _wrong('"rpc_layer" must be "grpc"', config["rpc_layer"], "Leave it out")
    jobs = _read_jobs(config["cluster"])
    chief, workers = jobs.get("chief", []), jobs.get("worker", [])
    job, index = _read_task(config["task"], jobs)
    if job == "worker":
        index += len(chief)
    return Cluster([*chief, *workers], None if job == "evaluator" else index, source="TF_CONFIG")


def _read_jobs(cluster: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the addresses by task type; ``master`` is read as ``chief``."""
    jobs: dict[str, list[str]] = {}
    for key, addresses in cluster.items():
        job = _job_of(key)
        if job not in ("chief", "worker", "evaluator"):
            raise _wrong('"cluster" has an unknown task type', key, _KNOWN)
        if not isinstance(addresses, list):
            raise _wrong(f"cluster.{key} must be a list of addresses", addresses)
        if job == "chief" and (len(addresses) != 1 or job in jobs):
            cure = 'There is one, also called master. List the others under "worker"'
            raise _wrong('"cluster" must have one chief', cluster, cure)
        jobs[job] = addresses
    return jobs


def _job_of(kind: Any) -> Any:
    """Returns a task type as TensorFlow calls it today."""
    if kind == "master":
        return "chief"
    return kind


def _read_task(task: dict[str, Any], jobs: Mapping[str, list[str]]) -> tuple[str, int]:
    job, index = _job_of(task.get("type")), task.get("index")
    # Kubeflow leaves the evaluator out of the cluster, and it needs no address.
    if job != "evaluator" and job not in list(jobs):
        raise _wrong("task.type is not in the cluster", job, f"It has {[*jobs]}. {_KNOWN}")
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    count = len(jobs.get(job, [0]))
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        cure = f"cluster.{job} has {count} addresses: 0 to {count - 1}"
        raise _wrong("task.index is out of range, or not a whole number", index, cure)
    return job, index


def _wrong(what: str, value: object, cure: str = _EXAMPLE) -> ClusterError:
    return ClusterError(f"TF_CONFIG: {what}.", f"{value!r:.2000}", f"{cure}.")
