"""Diagnostics: reports on a machine or a program, with the line to change."""

from tfmultigpu.addons.diagnostics.links import check_links
from tfmultigpu.addons.diagnostics.machine_report import doctor
from tfmultigpu.addons.diagnostics.program_report import explain
from tfmultigpu.addons.diagnostics.report import Finding, Report

__all__ = ["Finding", "Report", "check_links", "doctor", "explain"]
