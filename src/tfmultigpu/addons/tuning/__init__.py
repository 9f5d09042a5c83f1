"""Tuning: memory and batch sizes, capacities of replicas, and the speed of a step."""

from tfmultigpu.addons.tuning.batch_size import find_batch_size
from tfmultigpu.addons.tuning.capacities import memory_capacities
from tfmultigpu.addons.tuning.counted_memory import plan_memory
from tfmultigpu.addons.tuning.memory_plan import DeviceMemory, MemoryOption, Plan
from tfmultigpu.addons.tuning.memory_probe import MemoryPeak
from tfmultigpu.addons.tuning.profile import StepProfile, profile_step
from tfmultigpu.addons.tuning.speeds import measured_capacities

__all__ = [
    "DeviceMemory",
    "MemoryOption",
    "MemoryPeak",
    "Plan",
    "StepProfile",
    "find_batch_size",
    "measured_capacities",
    "memory_capacities",
    "plan_memory",
    "profile_step",
]
