"""Workers: the processes that train together, how they meet, and the loss of one of them."""

from tfmultigpu.addons.workers.files import is_first, own_path
from tfmultigpu.addons.workers.sources import cluster_from_environment
from tfmultigpu.clusters import Cluster

__all__ = ["Cluster", "cluster_from_environment", "is_first", "own_path"]
