"""Tuning: batch sizes, capacities of replicas, and the speed of a step."""

from tfmultigpu.addons.tuning.batch_size import find_batch_size
from tfmultigpu.addons.tuning.capacities import memory_capacities
from tfmultigpu.addons.tuning.scaling import ScalingRow, measure_scaling
from tfmultigpu.addons.tuning.speeds import measured_capacities
from tfmultigpu.addons.tuning.step_profile import Advice, StepProfile, profile_step

__all__ = [
    "Advice",
    "ScalingRow",
    "StepProfile",
    "find_batch_size",
    "measure_scaling",
    "measured_capacities",
    "memory_capacities",
    "profile_step",
]
