"""Trains with losses over the whole batch and prints what came out; run as one of the workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tensorflow as tf

# Run as a script, where pytest does not put this folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from one_device import Replicated, as_dataset
from test_row_gathering import CASES, batches_of, sgd

import tfmultigpu as tmg

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def train(case: str, shares: tuple[int, int] | None) -> dict[str, list[float]]:
    build, arrays, _, options = CASES[case]
    run = Replicated(strategy, build, sgd, **{"loss": None, **options()})
    data = tmg.distribute_dataset(as_dataset(batches_of(arrays)), strategy, shares=shares)
    result = run.train(data)
    weights = [float(number) for weight in result.weights for number in weight.ravel()]
    return {"weights": weights, "losses": result.losses}


results = {"simclr": train("simclr", (3, 1)), "dice": train("dice", None)}
print("RESULT", json.dumps(results))
