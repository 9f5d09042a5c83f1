"""Verifies first steps over two workers and prints what came out; run as one of the workers."""

from __future__ import annotations

import json
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from one_strategy import strategy

import tfmultigpu as tmg
from tfmultigpu.addons.verification import verify

random = np.random.default_rng(0)
X = random.normal(size=(24, 4)).astype("float32")
Y = random.normal(size=(24, 2)).astype("float32")


def verified(*layers: Any, many: bool = False) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *[make() for make in layers]])
        model.add(keras.layers.Dense(2))
        optimizer = keras.optimizers.SGD(0.1)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    iterator = iter(tmg.distribute_dataset((X, Y), strategy, batch_size=12))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = step.run(iterator, 5) if many else step(next(iterator))
    found = step.verification
    said = [one for one in caught if issubclass(one.category, tmg.ReplicaDependenceWarning)]
    return {
        "outcome": found.outcome,
        "culprit": found.culprit.split(" ")[0],
        "warnings": len(said),
        "steps": int(logs.get("steps", 1)),
    }


def minus_mean() -> Any:
    return keras.layers.Lambda(lambda x: x - tf.reduce_mean(x, 0))


synchronized = lambda: keras.layers.BatchNormalization(synchronized=True)  # noqa: E731
results = {
    "same": verified(synchronized, lambda: keras.layers.Dropout(0.5), many=True),
    "different": verified(minus_mean, many=True),
}
verify.GATHERED_BYTES = 16  # As if the batch were too large to be sent.
results["too large"] = verified(minus_mean)
print("RESULT", json.dumps(results))
