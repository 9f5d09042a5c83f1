"""Checkpoints: a run that was killed resumes, and equals one that was not."""

from tfmultigpu.checkpoints.manager import Checkpoints

__all__ = [
    "Checkpoints",
]
