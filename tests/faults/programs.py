"""Training programs that can be killed at any moment; run.py starts them again until they end."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

EPOCHS, EVERY = 4, 3
_random = np.random.default_rng(0)
X = _random.normal(size=(118, 6)).astype("float32")  # The last batch of 8 has six rows.
Y = _random.integers(0, 3, len(X))


class Progress(keras.callbacks.Callback):
    """Says how far ``fit`` is."""

    every_batches = EVERY

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        print("STEP", batch, flush=True)


def train(program: str, folder: str) -> str:
    """Trains from the newest checkpoint to the end; returns a digest of all that was trained."""
    alone = tmg.workers.cluster_from_environment() is None
    if alone:
        tmg.split_device("CPU:0", parts=2)
    devices = 2 if alone else None
    strategy = tmg.create_strategy(devices=devices, startup_timeout=30.0)
    keras.utils.set_random_seed(4)
    # The first values of variables are sent to all workers, too.
    with strategy.scope(), tmg.strategies.explaining_lost_workers():
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "tanh"),
                layers.BatchNormalization(synchronized=True),
                layers.Dropout(0.3),
                layers.Dense(3, "softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=3)
    data = tmg.distribute_dataset(rows.batch(8), strategy)
    place = Path(folder) / "checkpoints"
    if program == "fit":
        checkpoints = tmg.Checkpoints(place, model, model.optimizer, data)
        checkpoints.restore()
        callbacks = [Progress(), checkpoints.callback(every_steps=EVERY)]
        options = {"epochs": EPOCHS, "verbose": 0, "verify": False}
        tmg.fit(model, checkpoints.data, callbacks=callbacks, validation_data=(X, Y), **options)
    else:
        step = tmg.make_train_step(model, model.optimizer, model.loss, strategy, verify=False)
        checkpoints = tmg.Checkpoints(place, train_step=step, data=data)
        checkpoints.restore()
        for _ in checkpoints.epochs(EPOCHS):
            for batch in checkpoints.data:
                step(batch)
                print("STEP", checkpoints.step, flush=True)
                checkpoints.after_step()
                if checkpoints.step % EVERY == 0:
                    checkpoints.save()
    values = [np.asarray(one) for one in [*model.variables, *model.optimizer.variables]]
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
