"""Verification: a step held to what one device computes on the same global batch."""

from tfmultigpu.addons.verification.outcome import Difference, Verification
from tfmultigpu.addons.verification.verify import Verify

__all__ = ["Difference", "Verification", "Verify"]
