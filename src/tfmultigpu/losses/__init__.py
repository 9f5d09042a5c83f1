"""Losses and metrics: sums and weights that are divided once."""

from tfmultigpu.accumulation.loss_sum import LossSum, global_mean, loss_sum

__all__ = [
    "LossSum",
    "global_mean",
    "loss_sum",
]
