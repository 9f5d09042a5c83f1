"""The schedulers that may describe a cluster, in the order in which they are asked."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfmultigpu.addons.workers.slurm import Slurm
from tfmultigpu.addons.workers.tf_config import TfConfig
from tfmultigpu.clusters import Cluster, Scheduler
from tfmultigpu.errors import ClusterError

SCHEDULERS: tuple[Scheduler, ...] = (TfConfig(), Slurm())


def cluster_from_environment(environ: Mapping[str, str] | None = None) -> Cluster | None:
    """Reads the cluster that ``TF_CONFIG`` or Slurm describes; starts nothing.

    Args:
        environ: The environment variables; None for the process's own.

    Returns:
        The cluster; None if nothing describes one.

    Raises:
        ClusterError: The description is wrong; the message names the field and its value.

    Example:
        >>> cluster_from_environment({}) is None
        True
    """
    environment = os.environ if environ is None else environ
    for scheduler in SCHEDULERS:
        cluster = scheduler.read(environment)
        if cluster is not None:
            return cluster
    return None


def why_no_cluster(environ: Mapping[str, str] | None = None) -> str:
    """Returns why the environment describes no cluster; an empty text if it does."""
    environment = os.environ if environ is None else environ
    reasons = []
    for scheduler in SCHEDULERS:
        try:
            if scheduler.read(environment) is None:
                reasons.append(scheduler.why_not(environment))
        except ClusterError as error:
            reasons.append(str(error))
    return "; ".join(reason for reason in reasons if reason)


def without_cluster(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables without those that make a process a worker."""
    variables = dict(environ)
    for scheduler in SCHEDULERS:
        for name in scheduler.variables:
            variables.pop(name, None)
    return variables


def job_id(environ: Mapping[str, str]) -> str:
    """Returns what numbers the job of this process, by the first scheduler that does."""
    for scheduler in SCHEDULERS:
        number = scheduler.job_id(environ)
        if number:
            return number
    return ""


def port_advice(cluster: Cluster) -> str:
    """Returns what to do if the port of a worker cannot be listened on."""
    for scheduler in SCHEDULERS:
        if scheduler.name == cluster.source:
            return scheduler.port_advice
    return f"Correct the index of this worker, or the list, in {cluster.source} on every worker."
