"""Clusters: the workers, their meeting, and the loss of one of them."""

from tfmultigpu.clusters.failures import explaining_lost_workers
from tfmultigpu.clusters.sources import cluster_from_environment
from tfmultigpu.clusters.spec import Cluster, ClusterSource

__all__ = [
    "Cluster",
    "ClusterSource",
    "cluster_from_environment",
    "explaining_lost_workers",
]
