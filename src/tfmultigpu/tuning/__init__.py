"""Tuning: batch sizes, capacities of replicas, and the speed of a step."""

from tfmultigpu.tuning.batch_size import find_batch_size
from tfmultigpu.tuning.capacities import measured_capacities, memory_capacities
from tfmultigpu.tuning.cost_model import CostModel, Network, Prediction, fit_costs, fit_network
from tfmultigpu.tuning.memory_plan import MemoryPlan, PlannedVariable, plan_memory
from tfmultigpu.tuning.scaling import Scaling, ScalingPoint, ScalingPrediction, measure_scaling
from tfmultigpu.tuning.step_profile import StepProfile, profile_step

__all__ = [
    "CostModel",
    "MemoryPlan",
    "Network",
    "PlannedVariable",
    "Prediction",
    "Scaling",
    "ScalingPoint",
    "ScalingPrediction",
    "StepProfile",
    "find_batch_size",
    "fit_costs",
    "fit_network",
    "measure_scaling",
    "measured_capacities",
    "memory_capacities",
    "plan_memory",
    "profile_step",
]
