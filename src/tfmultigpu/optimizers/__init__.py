"""Optimizers: gradients added over micro-batches and replicas, and one update."""

from tfmultigpu.optimizers.accumulation import GradientAccumulator
from tfmultigpu.optimizers.gradients import clip_gradients
from tfmultigpu.optimizers.loss_scaling import LossScale
from tfmultigpu.optimizers.update import apply_reduced_gradients

__all__ = [
    "GradientAccumulator",
    "LossScale",
    "apply_reduced_gradients",
    "clip_gradients",
]
