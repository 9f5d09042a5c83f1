"""Options of a step whose replicas add by collectives, as GPUs do.

Added in memory they are in tests/promises, with every feature on.
"""

from __future__ import annotations

import functools

from law.model import Training
from one_device import cut
from problems import MIXED, W, X, Y, crossentropy, mlp, sgd

from cases.case import Case
from tfmultigpu.strategies.collectives import forcing_addition


def clipped() -> Training:
    return Training(mlp(l2=0.05), sgd(), crossentropy("mean_with_sample_weight"), clip_norm=0.3)


by_collectives = functools.partial(forcing_addition, in_memory=False)
SCALED = {"micro_batches": 2, "loss_scale": 1024.0}
OWNED = {"micro_batches": 3, "shard_update": True}
BATCHES = cut((X, Y, W), MIXED)
CASES = [
    Case("a loss scale", clipped, BATCHES, SCALED, replicas=(4,), within=by_collectives),
    Case("owners", clipped, BATCHES, OWNED, replicas=(3,), within=by_collectives),
]
