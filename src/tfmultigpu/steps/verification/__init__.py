"""Verification: the first step held to what one device computes on the same global batch."""

from tfmultigpu.steps.verification.assigned import assigned_variables
from tfmultigpu.steps.verification.expectation import check_verify
from tfmultigpu.steps.verification.history import outcomes
from tfmultigpu.steps.verification.outcome import Difference, Verification
from tfmultigpu.steps.verification.verifier import Verifier

__all__ = [
    "Difference",
    "Verification",
    "Verifier",
    "assigned_variables",
    "check_verify",
    "outcomes",
]
