"""Trains as one of several workers, is killed where the command line says, and goes on."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.strategies.process_state import process_state

folder = Path(sys.argv[1])
# Which worker gets which signal before which step, for each attempt.
deaths = [tuple(map(int, one.split("@"))) for one in sys.argv[2:]]
attempt = int(os.environ.get("TFMULTIGPU_ATTEMPT", "0"))
victim, last, number = deaths[attempt] if attempt < len(deaths) else (-1, -1, -1)

strategy = tmg.create_strategy()
link = process_state.cluster
me = 0 if link is None else link.index
rng = np.random.default_rng(0)
x, y = rng.normal(size=(70, 6)).astype("float32"), rng.integers(0, 3, 70)
keras.utils.set_random_seed(1)
with strategy.scope():
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
    optimizer = keras.optimizers.Adam(0.01)
step = tmg.make_train_step(model, optimizer, "sparse_categorical_crossentropy", strategy)
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=3).batch(8)
checkpoints = tmg.Checkpoints(folder / "checkpoints", train_step=step, data=data)
restored, first = checkpoints.restore(), True
for _ in checkpoints.epochs(2):
    for batch in checkpoints.data:
        if me == victim and checkpoints.step == last:
            os.kill(os.getpid(), number)
        loss = float(step(batch)["loss"])
        if me == 0 and first:
            with (folder / "first steps").open("a") as file:
                file.write(f"{attempt} {restored}\n")
        first = False
        checkpoints.after_step()
        if checkpoints.step % 3 == 0:
            checkpoints.save()
values = [np.asarray(variable) for variable in model.variables + optimizer.variables]
digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
print(f"RESULT {checkpoints.step} {loss!r} {digest}")
