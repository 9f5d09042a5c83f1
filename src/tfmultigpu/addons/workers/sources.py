"""The readers that find a cluster in the environment, in the order in which they are asked."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfmultigpu.addons.workers.cluster import Cluster
from tfmultigpu.addons.workers.slurm import read_slurm
from tfmultigpu.addons.workers.tf_config import read_tf_config
from tfmultigpu.errors import ClusterError

# Each returns the cluster that environment variables describe; if they describe none, the reason,
# or an empty text. It raises ClusterError for a wrong description.
READERS = (read_tf_config, read_slurm)
# They make a process a worker. The launcher removes them from the environment of its workers.
VARIABLES = ("TF_CONFIG", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


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
    clusters = (read(environment) for read in READERS)
    return next((cluster for cluster in clusters if isinstance(cluster, Cluster)), None)


def why_no_cluster(environ: Mapping[str, str] | None = None) -> str:
    """Returns why the environment describes no cluster; an empty text if it does."""
    answers = []
    for read in READERS:
        try:
            answers.append(read(os.environ if environ is None else environ))
        except ClusterError as error:
            answers.append(f"{error}")
    return "; ".join(answer for answer in answers if answer and isinstance(answer, str))
