"""Loops over whole data with a compiled Keras model."""

from tfmultigpu.loops.evaluate import evaluate
from tfmultigpu.loops.fit import fit
from tfmultigpu.loops.fit_here import fit_here
from tfmultigpu.loops.predict import predict

__all__ = [
    "evaluate",
    "fit",
    "fit_here",
    "predict",
]
