"""The sources that can describe a cluster, in the order in which they are asked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tfmultigpu.addons.workers.slurm import SLURM
from tfmultigpu.addons.workers.spec import Cluster, ClusterSource
from tfmultigpu.addons.workers.tf_config import TF_CONFIG

__all__ = ["SOURCES", "cluster_from_environment", "why_no_cluster"]

SOURCES: tuple[ClusterSource, ...] = (TF_CONFIG, SLURM)


def cluster_from_environment(
    environ: Mapping[str, str] | None = None, *, sources: Sequence[ClusterSource] = SOURCES
) -> Cluster | None:
    """Reads the cluster that the environment describes; starts nothing.

    Args:
        environ: The environment variables; None for those of the process.
        sources: The sources to ask, in this order.

    Returns:
        The cluster; None if nothing describes one.

    Raises:
        ClusterError: The description is wrong; the message names the field and its value.

    Example:
        >>> cluster_from_environment({}) is None
        True
    """
    environment = os.environ if environ is None else environ
    for source in sources:
        cluster = source.read(environment)
        if cluster is not None:
            return cluster
    return None


def why_no_cluster(
    environ: Mapping[str, str] | None = None, *, sources: Sequence[ClusterSource] = SOURCES
) -> str:
    """Returns why the environment describes no cluster.

    Args:
        environ: The environment variables; None for those of the process.
        sources: The sources to ask, in this order.

    Example:
        >>> why_no_cluster({})
        'TF_CONFIG is not set'
    """
    environment = os.environ if environ is None else environ
    found = []
    for source in sources:
        why = source.why_absent(environment)
        if why is not None:
            found.append(f"{why}: {source.start}" if source.start else why)
    return "; ".join(found) or "nothing describes one"
