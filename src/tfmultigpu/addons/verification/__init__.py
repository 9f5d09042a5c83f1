"""Verification: a step compared with what one device computes on the same global batch."""

from tfmultigpu.addons.verification.compare import Verification
from tfmultigpu.addons.verification.verify import Verify

__all__ = ["Verification", "Verify"]
