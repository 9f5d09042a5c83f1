"""What two workers do with checkpoints; each part prints what it found on a line of its own."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

shared = Path(sys.argv[1])
strategy = tmg.create_strategy(prefer="multi_worker", fallback=False)
worker = strategy.cluster_resolver.task_id
random = np.random.default_rng(0)
X, Y = random.normal(size=(22, 4)).astype("float32"), random.normal(size=(22, 1)).astype("float32")
warnings.simplefilter("ignore", tmg.ReplicaDependenceWarning)
keras.utils.set_random_seed(1)
with strategy.scope():
    # Its statistics differ between the workers.
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
step = tmg.make_train_step(model, optimizer, "mse", strategy)
variables = [*model.variables, *optimizer.variables]
start = [variable.numpy() for variable in variables]


def assign(values: list) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def state() -> str:
    return hashlib.sha256(
        b"".join(variable.numpy().tobytes() for variable in variables)
    ).hexdigest()


def say(name: str, value: object) -> None:
    print("RESULT", json.dumps({name: value}), flush=True)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).batch(4)


def train(directory: Path, epochs: int = 3, leave: int | None = None):
    run = tmg.Checkpoints(directory, model, optimizer, dataset())
    restored = run.restore()
    for _ in run.epochs(epochs):
        for batch in run.data:
            step(batch)
            run.after_step()
            if run.step == leave:
                run.save()
                return restored, run.step
    return restored, run.step


# Uninterrupted; then left in the middle, everything forgotten, and gone on with.
train(shared / "a")
say("uninterrupted", state())
assign(start)
train(shared / "b", leave=8)
say("statistics", variables[3].numpy().tolist())
assign([value + 1 for value in start])
say("gone on", train(shared / "b"))  # Which saves nothing more.
say("state", state())

# Directories that only look alike.
own = shared / f"own-{worker}"
tmg.Checkpoints(own, model, optimizer).save()
try:
    tmg.Checkpoints(own, model, optimizer).restore()
except tmg.CheckpointError as error:
    say("restore", str(error))
say("unchanged", optimizer.iterations.numpy().item() > 0)

# A disk that fails the first worker.
(shared / "file").write_text("")
try:
    tmg.Checkpoints(shared / "file" / "run", model).save()
except tmg.CheckpointError as error:
    say("failed", str(error))

# A run that a callback ended is over on all workers, whatever else the first alone does.
with strategy.scope():
    model.compile(optimizer, "mse")
for attempt in ("ended", "ended again"):
    run = tmg.Checkpoints(shared / "ended", model, optimizer)
    run.restore()
    stopping = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    logger = [keras.callbacks.CSVLogger(shared / "ended.csv")][worker:]
    callbacks = [stopping, *logger, run.callback()]
    fitted = tmg.fit(model, (X, Y), epochs=5, callbacks=callbacks, verify=False, verbose=0)
    say(attempt, [fitted.epoch, state()])
