"""Optimizers: gradients added over micro-batches and replicas, and one update."""

from tfmultigpu.optimizers.accumulation import GradientAccumulator
from tfmultigpu.optimizers.update import apply_reduced_gradients

__all__ = [
    "GradientAccumulator",
    "apply_reduced_gradients",
]
