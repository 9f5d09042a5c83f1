"""Sums and weights, divided once: losses, gradients, their scale and norm, and the one update."""

from tfmultigpu.accumulation.accumulator import GradientAccumulator
from tfmultigpu.accumulation.gradients import clip_gradients
from tfmultigpu.accumulation.loss_scale import LossScale
from tfmultigpu.accumulation.losses import LossSum, global_mean, loss_sum
from tfmultigpu.accumulation.update import apply_reduced_gradients

__all__ = [
    "GradientAccumulator",
    "LossScale",
    "LossSum",
    "apply_reduced_gradients",
    "clip_gradients",
    "global_mean",
    "loss_sum",
]
