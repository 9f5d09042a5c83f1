"""Tuning: batch sizes, capacities of replicas, and the speed of a step."""

from tfmultigpu.addons.tuning.batch_size import find_batch_size
from tfmultigpu.addons.tuning.capacities import memory_capacities
from tfmultigpu.addons.tuning.profile import StepProfile, profile_step
from tfmultigpu.addons.tuning.speeds import measured_capacities

__all__ = [
    "StepProfile",
    "find_batch_size",
    "measured_capacities",
    "memory_capacities",
    "profile_step",
]
