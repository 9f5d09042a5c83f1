"""``TF_CONFIG``, read strictly.

Descriptions that TensorFlow takes for one machine, or hangs on, are errors here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from tfmultigpu.addons.workers.spec import Cluster, ClusterSource, find_wrong_addresses
from tfmultigpu.errors import ClusterError

__all__ = ["TF_CONFIG", "read_tf_config"]

_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_NUMBER = re.compile(r"[0-9]{1,9}")
_LONGEST_SHOWN = 2000
_JOBS = ("chief", "master", "worker", "evaluator", "ps")
_NO_PS = (
    "Parameter servers are not supported: under TensorFlow's parameter server strategy "
    "`optimizer.iterations` counts wrongly, and updates are not those of one device. List the "
    'machines under "worker" instead'
)


def read_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """Reads ``TF_CONFIG``, as written by hand, by Kubeflow, by Vertex AI or by Ray Train.

    Returns:
        The cluster; None if the variable is not set.

    Raises:
        ClusterError: The description is wrong; the message names the field and its value.

    Example:
        >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        >>> read_tf_config({"TF_CONFIG": text}).index
        1
    """
    text = environ.get("TF_CONFIG")
    if text is None:
        return None
    try:
        config = json.loads(text)
    except RecursionError:
        raise _wrong("is nested too deeply to be read", text) from None
    except ValueError as error:
        raise _wrong("is not JSON", text, f"{error}. Unset TF_CONFIG to train alone") from error
    if not isinstance(config, dict):
        raise _wrong("must be a JSON object", text, "Unset TF_CONFIG to train alone")
    if "sparseCluster" in config:
        raise _wrong(
            'has "sparseCluster"',
            config["sparseCluster"],
            "It names only some of the workers, and TensorFlow would train on one alone. Remove "
            "enableDynamicWorker from Kubeflow's TFJob",
        )
    if config.get("rpc_layer", "grpc") != "grpc":
        raise _wrong('"rpc_layer" must be "grpc"', config["rpc_layer"], "Leave it out")
    jobs = _read_jobs(config)
    workers = (*jobs.get("chief", ()), *jobs.get("worker", ()))
    if not workers:
        raise _wrong(
            '"cluster" lists no worker', config["cluster"], "Without one nobody would train"
        )
    task_type, task_index = _read_task(config, jobs)
    offset = len(jobs.get("chief", ())) if task_type == "worker" else 0
    return Cluster(
        workers=workers,
        index=None if task_type == "evaluator" else offset + task_index,
        task_type=task_type,
        task_index=task_index,
        has_chief="chief" in jobs,
        source=TF_CONFIG,
    )


def _why_absent(environ: Mapping[str, str]) -> str | None:
    return None if "TF_CONFIG" in environ else "TF_CONFIG is not set"


TF_CONFIG = ClusterSource(
    "TF_CONFIG",
    read=read_tf_config,
    why_absent=_why_absent,
    same='"cluster" in TF_CONFIG',
    own='"task"',
    fix="Correct TF_CONFIG, or train alone: unset TF_CONFIG",
    variables=("TF_CONFIG",),
    hosts=("TF_CONFIG",),
    shown=("TF_CONFIG",),
)


def _read_jobs(config: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster")
    if not isinstance(cluster, dict) or not cluster:
        what = '"cluster" must list the workers' if "cluster" in config else 'has no "cluster"'
        raise _wrong(what, cluster if "cluster" in config else dict(config))
    fields: list[tuple[str, object]] = []
    jobs: dict[str, tuple[str, ...]] = {}
    for job, given in cluster.items():
        if job == "ps":
            raise _wrong('"cluster" has "ps"', given, _NO_PS)
        if job not in _JOBS:
            raise _wrong(
                '"cluster" has an unknown task type', job, "Known are chief, worker, evaluator"
            )
        addresses = _listed(job, given)
        fields += [(f"cluster.{job}[{place}]", one) for place, one in enumerate(addresses)]
        wrong = find_wrong_addresses(fields)
        if wrong is not None:
            raise _wrong(*wrong)
        name = "chief" if job == "master" else job
        if name in jobs:
            raise _wrong('"cluster" has both "chief" and "master"', cluster, "Keep one of them")
        jobs[name] = tuple(str(one) for one in addresses)
        if name == "chief" and len(addresses) != 1:
            raise _wrong(
                f"cluster.{job} must have one address",
                addresses,
                'There is one chief; list the others under "worker"',
            )
    return jobs


def _listed(job: str, given: object) -> list[object]:
    """Returns the addresses of a job: a list, or a dict by number as ``ClusterSpec`` allows."""
    if isinstance(given, list):
        return given
    if not isinstance(given, dict):
        raise _wrong(f"cluster.{job} must be a list of addresses", given)
    numbers = sorted(int(key) if _NUMBER.fullmatch(str(key)) else -1 for key in given)
    if numbers != list(range(len(given))):
        raise _wrong(
            f"cluster.{job} must number its addresses from 0 without a gap",
            given,
            "A task that is left out would wait for ever. List all of them",
        )
    return [given[key] for key in sorted(given, key=int)]


def _read_task(
    config: Mapping[str, object], jobs: Mapping[str, tuple[str, ...]]
) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict):
        raise _wrong(
            'has no "task"' if "task" not in config else '"task" must be an object',
            task if "task" in config else dict(config),
            "Every process needs to know which of the workers it is",
        )
    for key in ("type", "index"):
        if key not in task:
            raise _wrong(f"task.{key} is missing", task)
    given, index = task["type"], task["index"]
    if given == "ps":
        raise _wrong('task.type is "ps"', given, _NO_PS)
    job = "chief" if given == "master" else given
    # Kubeflow leaves the evaluator out of the cluster, and it needs no address.
    if not isinstance(job, str) or (job not in jobs and job != "evaluator"):
        raise _wrong("task.type is not in the cluster", given, f"It has {', '.join(jobs)}")
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise _wrong("task.index must be a whole number", index)
    count = len(jobs[job]) if job in jobs else index + 1
    if not 0 <= index < count:
        raise _wrong(
            "task.index is out of range",
            index,
            f"cluster.{given} has {count} addresses: 0 to {count - 1}"
            if count > 0
            else "It counts from 0",
        )
    return job, index


def _wrong(what: str, value: object, cure: str = f"It looks like {_EXAMPLE}") -> ClusterError:
    try:
        shown = repr(value)
    except RecursionError:
        shown = "something nested too deeply to be shown"
    if len(shown) > _LONGEST_SHOWN:
        shown = f"{shown[:_LONGEST_SHOWN]}..."
    return ClusterError(f"TF_CONFIG: {what}. {cure}. Received: {shown}")
