"""Diagnostics: what is wrong with a machine or a program, and what to change."""

from tfmultigpu.diagnostics.doctor import doctor
from tfmultigpu.diagnostics.explain import explain
from tfmultigpu.diagnostics.report import Finding, Report

__all__ = [
    "Finding",
    "Report",
    "doctor",
    "explain",
]
