"""What is wrong, and what to change: with the machine, a program, or the speed of a step."""

from tfmultigpu.diagnostics.checkup import doctor
from tfmultigpu.diagnostics.profiling import StepProfile, profile_step
from tfmultigpu.diagnostics.program import explain
from tfmultigpu.diagnostics.report import Finding, Report
from tfmultigpu.diagnostics.scaling import Scaling, ScalingPoint, measure_scaling

__all__ = [
    "Finding",
    "Report",
    "Scaling",
    "ScalingPoint",
    "StepProfile",
    "doctor",
    "explain",
    "measure_scaling",
    "profile_step",
]
