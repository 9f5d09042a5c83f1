"""``fit``, ``evaluate`` and ``predict``: the loops of Keras with the steps of this library."""

from tfmultigpu.addons.loops.evaluation import evaluate
from tfmultigpu.addons.loops.prediction import predict
from tfmultigpu.addons.loops.preparation import prepare
from tfmultigpu.addons.loops.training import fit

__all__ = ["evaluate", "fit", "predict", "prepare"]
