"""Whole passes over data with a compiled Keras model: ``fit``, ``evaluate`` and ``predict``."""

from tfmultigpu.loops.evaluating import evaluate
from tfmultigpu.loops.fitting import fit
from tfmultigpu.loops.predicting import predict

__all__ = ["evaluate", "fit", "predict"]
