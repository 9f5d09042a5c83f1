"""Checkpoints: a killed run resumes and equals an uninterrupted one."""

from tfmultigpu.addons.checkpoints.manager import Checkpoints

__all__ = ["Checkpoints"]
