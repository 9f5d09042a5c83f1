"""Trains with logical replicas; a worker gets a signal where the command line says."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

folder, *deaths = sys.argv[1:]
# Which worker gets which signal after which step, for each attempt.
attempt = int(os.environ["TFMULTIGPU_ATTEMPT"])
victim, last, number = map(int, [*deaths, "-1@0@0", "-1@0@0", "-1@0@0"][attempt].split("@"))
strategy = tmg.create_strategy(startup_timeout=300.0)
cluster = tmg.workers.cluster_from_environment()
worker = 0 if cluster is None else cluster.index

random = np.random.default_rng(0)
x = random.normal(size=(58, 6)).astype("float32")  # The last batch of 10 has eight rows.
y = random.integers(0, 3, len(x))
keras.utils.set_random_seed(4)
layers = keras.layers
with strategy.scope(), tmg.strategies.explaining_lost_workers():
    hidden = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, "softmax")])
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=3).batch(10)
checkpoints = tmg.Checkpoints(folder, model, model.optimizer, data)
restored = checkpoints.restore()
print("BEGINS", attempt, strategy.num_replicas_in_sync, restored, flush=True)


class Death(keras.callbacks.Callback):
    """Sends the signal to this process."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if worker == victim and int(np.asarray(self.model.optimizer.iterations)) == last:
            os.kill(os.getpid(), number)


history = tmg.fit(
    model,
    checkpoints.data,
    epochs=3,
    verbose=0,
    callbacks=[Death(), checkpoints.callback(every_steps=2)],
    validation_data=(x[:25], y[:25]),
    logical_replicas=4,
)
digest = hashlib.sha256(json.dumps(history.history, sort_keys=True).encode())
for variable in [*model.variables, *model.optimizer.variables]:
    digest.update(np.asarray(variable).tobytes())
print("RESULT", digest.hexdigest(), flush=True)
