"""Steps: one batch on all replicas, with the result of one device."""

from tfmultigpu.steps.batch_norm import synchronize_batch_norm
from tfmultigpu.steps.chain import ChainedStep, chain_steps
from tfmultigpu.steps.evaluate import EvalStep
from tfmultigpu.steps.features import Feature
from tfmultigpu.steps.features.one_trace import OneTrace
from tfmultigpu.steps.global_rows import gather_rows, rows
from tfmultigpu.steps.make import make_eval_step, make_predict_step, make_train_step
from tfmultigpu.steps.objective import Objective
from tfmultigpu.steps.predict import PredictStep
from tfmultigpu.steps.train import TrainStep
from tfmultigpu.steps.values import Gradient, Pass, Rows, Shards

__all__ = [
    "ChainedStep",
    "EvalStep",
    "Feature",
    "Gradient",
    "Objective",
    "OneTrace",
    "Pass",
    "PredictStep",
    "Rows",
    "Shards",
    "TrainStep",
    "chain_steps",
    "gather_rows",
    "make_eval_step",
    "make_predict_step",
    "make_train_step",
    "rows",
    "synchronize_batch_norm",
]
