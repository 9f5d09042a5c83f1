"""Steps: one batch on all replicas, with the result of one device."""

from tfmultigpu.steps.batch_norm import synchronize_batch_norm
from tfmultigpu.steps.chain import ChainedStep, chain_steps
from tfmultigpu.steps.evaluate import make_eval_step, make_predict_step
from tfmultigpu.steps.row_gathering import gather_rows, global_rows, row_positions
from tfmultigpu.steps.train import make_train_step
from tfmultigpu.steps.verification import Verification

__all__ = [
    "ChainedStep",
    "Verification",
    "chain_steps",
    "gather_rows",
    "global_rows",
    "make_eval_step",
    "make_predict_step",
    "make_train_step",
    "row_positions",
    "synchronize_batch_norm",
]
