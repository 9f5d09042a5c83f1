"""Trains with losses over the whole batch and prints what came out; run as one of the workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

# Run as a script, where pytest does not put this folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from test_rows import SIZES, data_of, ours

import tfmultigpu as tmg

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def train(case: str, shares: tuple[int, int] | None) -> tuple[list[float], float]:
    run = ours(strategy, case)
    data = tmg.distribute_dataset(data_of(case), strategy, shares=shares)
    logs: dict[str, Any] = run.step.run(iter(data), 99)
    assert int(logs["steps"]) == len(SIZES)
    weights = [float(number) for v in run.model.weights for number in v.numpy().ravel()]
    return weights, float(logs["loss"])


results = {"simclr": train("simclr", (3, 1)), "dice": train("dice", None)}
print("RESULT", json.dumps(results))
