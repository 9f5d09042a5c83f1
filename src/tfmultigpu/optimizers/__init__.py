"""Optimizers: gradients added over micro-batches and replicas, and one update."""

from tfmultigpu.accumulation.accumulator import GradientAccumulator
from tfmultigpu.accumulation.clipping import clip_gradients
from tfmultigpu.accumulation.loss_scale import LossScale
from tfmultigpu.accumulation.update import apply_reduced_gradients

__all__ = [
    "GradientAccumulator",
    "LossScale",
    "apply_reduced_gradients",
    "clip_gradients",
]
