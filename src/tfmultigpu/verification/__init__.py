"""Verification: the first step held to what one device computes on the same global batch."""

from tfmultigpu.verification.expectation import check_verify
from tfmultigpu.verification.history import outcomes
from tfmultigpu.verification.outcome import Difference, Verification
from tfmultigpu.verification.verifier import Verifier

__all__ = ["Difference", "Verification", "Verifier", "check_verify", "outcomes"]
