"""A training that can be killed at any moment; run.py starts it again until it ends."""

from __future__ import annotations

import hashlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

_random = np.random.default_rng(0)
X = _random.normal(size=(118, 6)).astype("float32")  # The last batch of 8 has six rows.
Y = _random.integers(0, 3, len(X))


def train(folder: str) -> str:
    """Trains from the newest checkpoint to the end; returns a digest of all that was trained."""
    alone = tmg.workers.cluster_from_environment() is None
    if alone:
        tmg.split_device("CPU:0", parts=2)
    strategy = tmg.create_strategy(devices=2 if alone else None, startup_timeout=30.0)
    keras.utils.set_random_seed(4)
    layers = keras.layers
    # The first values of variables are sent to all workers, too.
    with strategy.scope(), tmg.strategies.explaining_lost_workers():
        hidden = [layers.Dense(8, "tanh"), layers.BatchNormalization(synchronized=True)]
        hidden += [layers.Dropout(0.3), layers.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((6,)), *hidden])
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=3)
    data = tmg.distribute_dataset(rows.batch(8), strategy)
    checkpoints = tmg.Checkpoints(Path(folder) / "checkpoints", model, model.optimizer, data)
    checkpoints.restore()
    progress = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: print("STEP", batch, flush=True)
    )
    callbacks = [progress, checkpoints.callback(every_steps=3)]
    options = {"epochs": 4, "verbose": 0, "verify": False, "validation_data": (X, Y)}
    tmg.fit(model, checkpoints.data, callbacks=callbacks, **options)
    values = [np.asarray(one) for one in [*model.variables, *model.optimizer.variables]]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
