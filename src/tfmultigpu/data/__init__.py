"""Data: from global batches to one shard for each replica."""

from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset, row_weight
from tfmultigpu.data.shares import plan_shares

__all__ = ["ShardIterator", "ShardedDataset", "distribute_dataset", "plan_shares", "row_weight"]
