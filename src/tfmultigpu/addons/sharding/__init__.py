"""Models larger than one device: variables on one device each, and layers placed by hand."""

from tfmultigpu.addons.sharding.by_hand import LayersByHand
from tfmultigpu.addons.sharding.reads import ShardedReads
from tfmultigpu.addons.sharding.variables import sharded_variables

__all__ = ["LayersByHand", "ShardedReads", "sharded_variables"]
