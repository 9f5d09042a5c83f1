"""Who else is here: the cluster as the environment describes it, checked before TensorFlow starts.

Today that is `TF_CONFIG`. Another scheduler is one more function in `_READERS`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.rendezvous import meet

__all__ = ["Cluster", "cluster_from_environment", "preflight", "read_tf_config"]

_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_JOBS = ("chief", "master", "worker", "evaluator", "ps")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_NO_PS = (
    "Parameter servers are declined: under TensorFlow's parameter server strategy "
    "`optimizer.iterations` counts wrongly, and updates are not those of one device. List the "
    'machines under "worker" instead.'
)


@dataclass(frozen=True)
class Cluster:
    """The workers that train together, and which of them this process is.

    Attributes:
        workers: `host:port` of each, the chief first where there is one.
        index: the place of this process in `workers`; `None` for the evaluator, which is outside.
        task_type: `"chief"`, `"worker"` or `"evaluator"`; `master` is read as chief.
        task_index: the number within its task type.
        has_chief: whether the first worker has the task type chief.
        source: what described the cluster.
    """

    workers: tuple[str, ...]
    index: int | None
    task_type: str
    task_index: int
    has_chief: bool = False
    source: str = "TF_CONFIG"

    @property
    def address(self) -> str | None:
        """This worker's `host:port`; `None` for the evaluator."""
        return None if self.index is None else self.workers[self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this is the first worker, the one that writes checkpoints and logs."""
        return self.index == 0

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that are equal where the same workers are listed in the same order."""
        text = json.dumps([self.has_chief, *self.workers])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The workers as TensorFlow's `ClusterSpec` takes them."""
        first = 1 if self.has_chief else 0
        jobs = {"chief": list(self.workers[:first]), "worker": list(self.workers[first:])}
        return {job: addresses for job, addresses in jobs.items() if addresses}

    def __str__(self) -> str:
        """Which of the workers this process is."""
        if self.index is None:
            return f"evaluator {self.task_index} beside {len(self.workers)} workers"
        return f"worker {self.index} of {len(self.workers)} at {self.address} ({self.source})"


def cluster_from_environment(environ: Mapping[str, str] | None = None) -> Cluster | None:
    """Read the cluster that the environment describes; starts nothing.

    Args:
        environ: `None` for `os.environ`.

    Returns:
        The cluster; `None` where nothing describes one.

    Raises:
        ClusterError: the description is wrong; the message names the field and its value.

    Example:
        >>> cluster_from_environment({}) is None
        True
    """
    environment = os.environ if environ is None else environ
    for read in _READERS:
        cluster = read(environment)
        if cluster is not None:
            return cluster
    return None


def read_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """Read `TF_CONFIG`, strictly: what TensorFlow takes for one machine, or hangs on, is an error.

    Returns:
        The cluster; `None` where the variable is not set.

    Raises:
        ClusterError: see `cluster_from_environment`.

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
    except ValueError as error:
        raise _wrong("is not JSON", text, f"{error}. Unset TF_CONFIG to train alone") from error
    if not isinstance(config, dict):
        raise _wrong("must be a JSON object", text, "Unset TF_CONFIG to train alone")
    if "sparseCluster" in config:
        raise _wrong(
            'has "sparseCluster"',
            config["sparseCluster"],
            "It names only a part of the workers, and TensorFlow would train on one alone. In "
            "Kubeflow's TFJob take out enableDynamicWorker",
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
    )


def preflight(
    cluster: Cluster,
    *,
    devices: str,
    communication: str,
    timeout: float,
    problem: str | None = None,
) -> None:
    """Meet the other workers on their addresses, before TensorFlow takes the ports.

    Args:
        cluster: the cluster as this process sees it.
        devices: how many and of what kind this worker brings, such as `"1 CPU"`.
        communication: how the workers will add their gradients.
        timeout: seconds to wait for the others.
        problem: why this worker cannot start; the others are told, then it is raised.

    Raises:
        ClusterError: a worker is missing at the timeout, or disagrees on the cluster, the devices,
            the communication or the versions, or its port is taken; on every worker.

    Example:
        >>> one = Cluster(("localhost:23457",), 0, "worker", 0)
        >>> preflight(one, devices="1 CPU", communication="ring", timeout=5.0)
    """
    if cluster.index is None:
        raise ClusterError("The evaluator trains with nobody, and has nobody to meet.")
    jobs = ", ".join(f"{job} {addresses}" for job, addresses in cluster.jobs.items())
    card = {
        "the cluster": f"{jobs} ({cluster.fingerprint})",
        "their devices": devices,
        "communication": communication,
        "the version of tensorflow": tf.__version__,
        "the version of keras": _version("keras"),
    }
    cures = {
        "the cluster": 'Give every worker the same "cluster" in TF_CONFIG; only "task" differs.',
        "their devices": "Show every worker as many devices of one kind: CUDA_VISIBLE_DEVICES, "
        "or create_strategy(devices=...).",
        "communication": "Give every worker the same create_strategy(communication=...).",
        "the version of tensorflow": "Install the same version on every worker.",
        "the version of keras": "Install the same version on every worker.",
    }
    meet(cluster.workers, cluster.index, card, timeout, cures=cures, problem=problem)


def _read_jobs(config: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster")
    if not isinstance(cluster, dict) or not cluster:
        what = '"cluster" must list the workers' if "cluster" in config else 'has no "cluster"'
        raise _wrong(what, cluster if "cluster" in config else dict(config))
    owners: dict[str, str] = {}
    jobs: dict[str, tuple[str, ...]] = {}
    for job, addresses in cluster.items():
        if job == "ps":
            raise _wrong('"cluster" has "ps"', addresses, _NO_PS.rstrip("."))
        if job not in _JOBS:
            raise _wrong(
                '"cluster" has an unknown task type', job, "Known are chief, worker, evaluator"
            )
        if not isinstance(addresses, list):
            raise _wrong(f"cluster.{job} must be a list of addresses", addresses)
        for place, address in enumerate(addresses):
            field = f"cluster.{job}[{place}]"
            _check_address(field, address)
            if address.lower() in owners:
                raise _wrong(
                    f"{field} and {owners[address.lower()]} are the same address",
                    address,
                    "TensorFlow would wait for ever. Give every task a host and port of its own",
                )
            owners[address.lower()] = field
        name = "chief" if job == "master" else job
        if name in jobs:
            raise _wrong('"cluster" has both "chief" and "master"', cluster, "Keep one of them")
        jobs[name] = tuple(addresses)
        if name == "chief" and len(addresses) != 1:
            raise _wrong(
                f"cluster.{job} must have one address",
                addresses,
                'There is one chief; list the others under "worker"',
            )
    return jobs


def _check_address(field: str, address: object) -> None:
    if isinstance(address, str) and "://" in address:
        bare = address.split("://", 1)[1].rstrip("/")
        raise _wrong(f"{field} must be host:port, without a scheme", address, f'Write "{bare}"')
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise _wrong(f"{field} must be host:port", address, 'Write it as "host1:2222"')
    if not 1 <= int(match[2]) <= 65535:
        raise _wrong(f"{field} must have a port from 1 to 65535", address)


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
        raise _wrong('task.type is "ps"', given, _NO_PS.rstrip("."))
    job = "chief" if given == "master" else given
    # Kubeflow leaves the evaluator out of the cluster, and it needs no address.
    if not isinstance(job, str) or (job not in jobs and job != "evaluator"):
        raise _wrong("task.type is not in the cluster", given, f"It has {', '.join(jobs)}")
    if isinstance(index, str) and index.isdecimal():
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
    return ClusterError(f"TF_CONFIG: {what}. {cure}. Received: {value!r}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


_READERS: tuple[Callable[[Mapping[str, str]], Cluster | None], ...] = (read_tf_config,)
