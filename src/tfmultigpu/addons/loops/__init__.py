"""``fit``, ``evaluate`` and ``predict``: the loops of Keras with the steps of this library."""

from tfmultigpu.addons.loops.evaluate import evaluate
from tfmultigpu.addons.loops.fit import fit
from tfmultigpu.addons.loops.predict import predict
from tfmultigpu.addons.loops.prepare import prepare

__all__ = ["evaluate", "fit", "predict", "prepare"]
