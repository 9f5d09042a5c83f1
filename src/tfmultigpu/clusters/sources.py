"""Who else is here: the cluster as the environment describes it, checked before TensorFlow starts.

`TF_CONFIG` comes first, then Slurm. Another scheduler is one more function in `_READERS`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping

import tensorflow as tf

from tfmultigpu._version import __version__
from tfmultigpu.clusters.connection import WorkerLink
from tfmultigpu.clusters.jobs import Job, read_job
from tfmultigpu.clusters.rendezvous import meet
from tfmultigpu.clusters.slurm import read_slurm, why_no_slurm
from tfmultigpu.clusters.spec import Cluster
from tfmultigpu.clusters.tf_config import read_tf_config
from tfmultigpu.errors import ClusterError

__all__ = ["Cluster", "cluster_from_environment", "preflight", "why_no_cluster"]

_READERS: tuple[Callable[[Mapping[str, str]], Cluster | None], ...] = (read_tf_config, read_slurm)
# What of each description is the same on every worker, and what differs.
_FIELDS = {
    "TF_CONFIG": ('"cluster" in TF_CONFIG', '"task"'),
    "Cluster": ("Cluster(workers=...)", "index="),
    "Slurm": ("srun, and the same TFMULTIGPU_PORT if any", "SLURM_PROCID"),
}


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


def why_no_cluster(environ: Mapping[str, str] | None = None) -> str:
    """Say why the environment describes no cluster.

    Example:
        >>> why_no_cluster({})
        'TF_CONFIG is not set'
    """
    return why_no_slurm(os.environ if environ is None else environ) or "TF_CONFIG is not set"


def preflight(
    cluster: Cluster,
    *,
    devices: str,
    communication: str,
    timeout: float,
    problem: str | None = None,
) -> WorkerLink | None:
    """Meet the other workers on their addresses, before TensorFlow takes the ports.

    Args:
        cluster: the cluster as this process sees it.
        devices: how many and of what kind this worker brings, such as `"1 CPU"`.
        communication: how the workers will add their gradients.
        timeout: seconds to wait for the others.
        problem: why this worker cannot start; the others are told, then it is raised.

    Returns:
        The connections to the others, which stay; `None` where there are none.

    Raises:
        ClusterError: a worker is missing at the timeout, or disagrees on the cluster, the devices,
            the communication or the versions, or belongs to another job, or its port is taken; on
            every worker. Or `TFMULTIGPU_JOB_ID` or `TFMULTIGPU_JOB_SECRET` is wrong.

    Example:
        >>> one = Cluster(("localhost:23457",), 0, "worker", 0)
        >>> preflight(one, devices="1 CPU", communication="ring", timeout=5.0) is None
        True
    """
    if cluster.index is None:
        raise ClusterError("The evaluator trains with nobody, and has nobody to meet.")
    jobs = ", ".join(f"{job} {addresses}" for job, addresses in cluster.jobs.items())
    card = {
        "the cluster": f"{jobs} ({cluster.fingerprint})",
        "their devices": devices,
        "communication": communication,
        "the version of tfmultigpu": __version__,
        "the version of tensorflow": tf.__version__,
        "the version of keras": _version("keras"),
        "the version of python": ".".join(platform.python_version_tuple()[:2]),
    }
    workers, own = _FIELDS.get(cluster.source, ("list of workers", "which of them it is"))
    cures = {
        "the cluster": f"Give every worker the same {workers}; only {own} differs.",
        "their devices": "Show every worker as many devices of one kind: CUDA_VISIBLE_DEVICES, "
        "or create_strategy(devices=...).",
        "communication": "Give every worker the same create_strategy(communication=...).",
    }
    versions = [field for field in card if field.startswith("the version of")]
    cures |= dict.fromkeys(versions, "Install the same version on every worker.")
    try:
        job = read_job(os.environ)
    except ClusterError as error:
        job, problem = Job(), problem or str(error)
    return meet(
        cluster.workers,
        cluster.index,
        card,
        timeout,
        cures=cures,
        problem=problem,
        source=cluster.source,
        stay=True,
        job=job,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
