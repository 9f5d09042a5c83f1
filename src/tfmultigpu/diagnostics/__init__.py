"""What is wrong, and what to change: with the machine, a program, or the speed of a step."""

from tfmultigpu.diagnostics.checkup import doctor
from tfmultigpu.diagnostics.program import explain
from tfmultigpu.diagnostics.report import Finding, Report

__all__ = ["Finding", "Report", "doctor", "explain"]
