"""A training with logical replicas, whose worker ends where a test says."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import this_worker
from law import worker_functions

import tfmultigpu as tmg
from tfmultigpu.addons.verification.one_device import OneDevice

EPOCHS = 3  # Of six steps each.
_random = np.random.default_rng(0)
X = _random.normal(size=(58, 6)).astype("float32")  # The last batch of 10 has eight rows.
Y = _random.integers(0, 3, len(X))


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def train(
    folder: str, strategy: Any, callbacks: Sequence[Any] = (), epochs: int = EPOCHS
) -> tuple[int | None, str]:
    """Trains from the newest checkpoint on; returns its step, and a digest of all at the end."""
    keras.utils.set_random_seed(4)
    layers = keras.layers
    with strategy.scope(), tmg.strategies.explaining_lost_workers():
        hidden = [layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, "softmax")])
        loss = "sparse_categorical_crossentropy"
        model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=3).batch(10)
    checkpoints = tmg.Checkpoints(folder, model, model.optimizer, data)
    restored = checkpoints.restore()
    print("RESTORED", restored, flush=True)
    history = tmg.fit(
        model,
        checkpoints.data,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks, checkpoints.callback(every_steps=2)],
        validation_data=(X[:25], Y[:25]),
        logical_replicas=4,
    )
    digest = hashlib.sha256(json.dumps(history.history, sort_keys=True).encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        digest.update(np.asarray(variable).tobytes())
    return restored, digest.hexdigest()


class AtStep(keras.callbacks.Callback):
    """Calls a function after a step of the run."""

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        super().__init__()
        self.step, self.function = step, function

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(np.asarray(self.model.optimizer.iterations)) == self.step:
            self.function()


def train_alone(folder: str, until: int | None = None) -> tuple[int | None, str]:
    """Trains on one device to the end, or until a step that it has saved."""

    def leave() -> None:
        raise KeyboardInterrupt

    callbacks = [] if until is None else [AtStep(until + 1, leave)]
    try:
        return train(folder, tf.distribute.get_strategy(), callbacks)
    except KeyboardInterrupt:
        return until, ""


def half_written(file: Any, **arrays: Any) -> None:
    file.write(b"PK half of a file")
    file.flush()
    die()


def train_and_die(folder: str, victim: int, place: str) -> str:
    """Joins, and trains; one worker is killed at a place of its program."""
    worker_functions.join()
    is_victim = this_worker.index() == victim
    in_validation = keras.callbacks.LambdaCallback()
    in_validation.on_test_batch_end = lambda batch, logs=None: die()
    patches = {
        "save": (np, "savez", half_written),
        "restore": (np, "load", lambda *_, **__: die()),
        "check": (OneDevice, "run", lambda *_, **__: die()),
    }
    callbacks = [in_validation] if is_victim and place == "validation" else []
    print("TRAINS", flush=True)
    if is_victim and place in patches:
        with mock.patch.object(*patches[place]):
            return train(folder, this_worker.strategy(), callbacks)[1]
    return train(folder, this_worker.strategy(), callbacks)[1]
