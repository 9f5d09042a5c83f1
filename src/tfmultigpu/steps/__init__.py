"""Steps: one batch on all replicas, with the result of one device."""

from tfmultigpu.steps.batch_norm import synchronize_batch_norm
from tfmultigpu.steps.chain import ChainedStep, chain_steps
from tfmultigpu.steps.features import Feature, Gradient, Pass, Rows, Shards
from tfmultigpu.steps.global_rows import gather_rows, rows
from tfmultigpu.steps.make import make_eval_step, make_predict_step, make_train_step
from tfmultigpu.steps.objective import Objective
from tfmultigpu.steps.step import TrainStep

__all__ = [
    "ChainedStep",
    "Feature",
    "Gradient",
    "Objective",
    "Pass",
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
