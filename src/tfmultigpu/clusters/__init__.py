"""Clusters: who the workers are, how they meet, and what happens when one is lost."""

from tfmultigpu.clusters.failures import explaining_lost_workers
from tfmultigpu.clusters.sources import cluster_from_environment
from tfmultigpu.clusters.spec import Cluster

__all__ = [
    "Cluster",
    "cluster_from_environment",
    "explaining_lost_workers",
]
