"""Clusters: the workers, their meeting, and the loss of one of them."""

from tfmultigpu.addons.workers.sources import cluster_from_environment
from tfmultigpu.addons.workers.spec import Cluster, ClusterSource

__all__ = [
    "Cluster",
    "ClusterSource",
    "cluster_from_environment",
]
