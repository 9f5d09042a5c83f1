"""``TF_CONFIG``, read strictly.

Descriptions that TensorFlow takes for one machine, or hangs on, are errors here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tfmultigpu.addons.workers.cluster import Cluster, find_wrong_address
from tfmultigpu.errors import ClusterError

_EXAMPLE = (
    'It looks like {"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_NUMBER = re.compile(r"[0-9]{1,9}")
_JOBS = ("chief", "worker", "evaluator")
_NO_PS = (
    "Parameter servers are not supported: under TensorFlow's parameter server strategy "
    "`optimizer.iterations` counts wrongly, and updates are not those of one device. List the "
    'machines under "worker" instead'
)


def read_tf_config(environ: Mapping[str, str]) -> Cluster | str:
    """Reads ``TF_CONFIG``, as written by hand, by Kubeflow, by Vertex AI or by Ray Train."""
    text = environ.get("TF_CONFIG")
    if text is None:
        return "TF_CONFIG is not set"
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong("is not JSON", text, f"{error}. Unset TF_CONFIG to train alone") from error
    if not isinstance(config, dict):
        raise _wrong("must be a JSON object", text, "Unset TF_CONFIG to train alone")
    if "sparseCluster" in config:
        cure = "TensorFlow would train alone. Remove enableDynamicWorker from Kubeflow's TFJob"
        raise _wrong('has "sparseCluster"', config["sparseCluster"], cure)
    if config.get("rpc_layer", "grpc") != "grpc":
        raise _wrong('"rpc_layer" must be "grpc"', config["rpc_layer"], "Leave it out")
    jobs = _read_jobs(config)
    workers = [*jobs.get("chief", ()), *jobs.get("worker", ())]
    if not workers:
        cure = "Without one nobody would train"
        raise _wrong('"cluster" lists no worker', config["cluster"], cure)
    task_type, index = _read_task(config, jobs)
    if task_type == "worker":
        index += len(jobs.get("chief", ()))
    return Cluster(workers, None if task_type == "evaluator" else index, source="TF_CONFIG")


def _read_jobs(config: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the addresses by task type; ``master`` is read as ``chief``."""
    if not config.get("cluster") or not isinstance(config["cluster"], dict):
        what = '"cluster" must list the workers' if "cluster" in config else 'has no "cluster"'
        raise _wrong(what, config.get("cluster", config))
    cluster = config["cluster"]
    names: dict[str, object] = {}
    jobs: dict[str, list[str]] = {}
    for key, listed in cluster.items():
        job = "chief" if key == "master" else key
        if job == "ps":
            raise _wrong('"cluster" has "ps"', listed, _NO_PS)
        if job not in _JOBS:
            cure = "Known are chief, worker, evaluator"
            raise _wrong('"cluster" has an unknown task type', key, cure)
        if job in jobs:
            raise _wrong('"cluster" has both "chief" and "master"', cluster, "Keep one of them")
        if not isinstance(listed, list):
            raise _wrong(f"cluster.{key} must be a list of addresses", listed)
        jobs[job] = listed
        names |= {f"cluster.{key}[{place}]": one for place, one in enumerate(jobs[job])}
        if (wrong := find_wrong_address(names)) is not None:
            raise _wrong(*wrong)
        if job == "chief" and len(jobs[job]) != 1:
            cure = 'There is one chief; list the others under "worker"'
            raise _wrong(f"cluster.{key} must have one address", listed, cure)
    return jobs


def _read_task(config: dict[str, Any], jobs: Mapping[str, list[str]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict):
        what = '"task" must be an object' if "task" in config else 'has no "task"'
        cure = "Every process needs to know which of the workers it is"
        raise _wrong(what, config.get("task", config), cure)
    for key in ("type", "index"):
        if key not in task:
            raise _wrong(f"task.{key} is missing", task)
    job = "chief" if task["type"] == "master" else task["type"]
    if job == "ps":
        raise _wrong('task.type is "ps"', job, _NO_PS)
    # Kubeflow leaves the evaluator out of the cluster, and it needs no address.
    if job != "evaluator" and (not isinstance(job, str) or job not in jobs):
        raise _wrong("task.type is not in the cluster", job, f"It has {', '.join(jobs)}")
    index = task["index"]
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise _wrong("task.index must be a whole number", index)
    count = len(jobs[job]) if job in jobs else max(1, index + 1)
    if not 0 <= index < count:
        cure = f"cluster.{task['type']} has {count} addresses: 0 to {count - 1}"
        raise _wrong("task.index is out of range", index, cure)
    return job, index


def _wrong(what: str, value: object, cure: str = _EXAMPLE) -> ClusterError:
    return ClusterError(f"TF_CONFIG: {what}. {cure}. Received: {value!r:.2000}")
