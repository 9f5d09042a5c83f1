"""The checks of a cluster before TensorFlow starts: are all workers here, and do they agree."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from tfmultigpu._version import __version__
from tfmultigpu.addons.workers.connection import WorkerLink
from tfmultigpu.addons.workers.jobs import Job, read_job
from tfmultigpu.addons.workers.rendezvous import meet
from tfmultigpu.addons.workers.sources import SOURCES
from tfmultigpu.addons.workers.spec import Cluster
from tfmultigpu.errors import ClusterError

__all__ = ["preflight"]


def preflight(
    cluster: Cluster,
    *,
    devices: str,
    communication: str,
    timeout: float,
    problem: str | None = None,
) -> WorkerLink | None:
    """Meets the other workers on their addresses, before TensorFlow takes the ports.

    Args:
        cluster: The cluster as this process sees it.
        devices: The number and the kind of the devices of this worker, such as ``"1 CPU"``.
        communication: How the workers will add their gradients.
        timeout: Seconds to wait for the others.
        problem: Why this worker cannot start. The others are told; then it is raised here.

    Returns:
        The connections to the others, which stay open; None if there are none.

    Raises:
        ClusterError: A worker is missing at the timeout, its port is taken, or it disagrees about
            the cluster, the devices, the communication or a version, or belongs to another job.
            Every worker raises it. Or ``TFMULTIGPU_JOB_ID`` or ``TFMULTIGPU_JOB_SECRET`` is wrong.

    Example:
        >>> one = Cluster(("localhost:23457",), 0, "worker", 0)
        >>> preflight(one, devices="1 CPU", communication="ring", timeout=5.0) is None
        True
    """
    import tensorflow as tf

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
    source = cluster.source
    cures = {
        "the cluster": f"Give every worker the same {source.same}; only {source.own} differs.",
        "their devices": "Show every worker as many devices of one kind: CUDA_VISIBLE_DEVICES, "
        "or create_strategy(devices=...).",
        "communication": "Give every worker the same create_strategy(communication=...).",
    }
    versions = [name for name in card if name.startswith("the version of")]
    cures |= dict.fromkeys(versions, "Install the same version on every worker.")
    try:
        job = read_job(os.environ, (cluster.source, *SOURCES))
    except ClusterError as error:
        job, problem = Job(), problem or str(error)
    return meet(
        cluster.workers,
        cluster.index,
        card,
        timeout,
        cures=cures,
        problem=problem,
        source=source,
        stay=True,
        job=job,
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
