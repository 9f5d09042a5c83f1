"""The sources that can describe a cluster, in the order in which they are asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfmultigpu.addons.workers.cluster import Cluster
from tfmultigpu.addons.workers.slurm import read_slurm
from tfmultigpu.addons.workers.tf_config import read_tf_config
from tfmultigpu.errors import ClusterError


class ClusterSource(NamedTuple):
    """A way to describe a cluster, such as ``TF_CONFIG`` or a scheduler.

    Attributes:
        name: Its name in messages.
        read: Returns the cluster that environment variables describe; if they describe none, the
            reason, or an empty text. Raises ``ClusterError`` for a wrong description.
        variables: The environment variables that make a process a worker. The launcher removes
            them from the environment of its workers.
    """

    name: str
    read: Callable[[Mapping[str, str]], Cluster | str]
    variables: tuple[str, ...]


SOURCES = (
    ClusterSource("TF_CONFIG", read_tf_config, ("TF_CONFIG",)),
    ClusterSource("Slurm", read_slurm, ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")),
)


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
        if isinstance(cluster, Cluster):
            return cluster
    return None


def why_no_cluster(environ: Mapping[str, str] | None = None) -> str:
    """Returns why the environment describes no cluster; an empty text if it does."""
    answers = []
    for source in SOURCES:
        try:
            answers.append(source.read(os.environ if environ is None else environ))
        except ClusterError as error:
            answers.append(f"{error}")
    return "; ".join(answer for answer in answers if answer and isinstance(answer, str))
