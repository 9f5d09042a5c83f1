"""Tuning: batch sizes, capacities of replicas, and the speed of a step."""

from tfmultigpu.tuning.batch_size import find_batch_size
from tfmultigpu.tuning.capacities import measured_capacities, memory_capacities
from tfmultigpu.tuning.memory_plan import MemoryPlan, PlannedVariable, plan_memory
from tfmultigpu.tuning.scaling import Scaling, ScalingPoint, measure_scaling
from tfmultigpu.tuning.step_profile import StepProfile, profile_step

__all__ = [
    "MemoryPlan",
    "PlannedVariable",
    "Scaling",
    "ScalingPoint",
    "StepProfile",
    "find_batch_size",
    "measure_scaling",
    "measured_capacities",
    "memory_capacities",
    "plan_memory",
    "profile_step",
]
