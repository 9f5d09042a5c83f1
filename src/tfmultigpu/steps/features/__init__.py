"""Features: the optional parts of a step, one idea in each file."""

from tfmultigpu.steps.features.feature import Feature

__all__ = ["Feature"]
