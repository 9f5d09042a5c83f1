"""Diagnostics: reports on a machine or a program, with the line to change."""

from tfmultigpu.diagnostics.doctor import doctor
from tfmultigpu.diagnostics.explain import explain
from tfmultigpu.diagnostics.report import Finding, Report

__all__ = [
    "Finding",
    "Report",
    "doctor",
    "explain",
]
