"""Training programs that can be killed at any moment; they say how far they are.

Each line that they print for the harness begins with a word in capitals. STEP n comes after step n
was made and before its checkpoint, so that all checkpoints of earlier steps are whole by then.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg

EPOCHS = 4
EVERY = 3
ROWS, BATCH = 118, 8  # The last batch has six rows.
STARTUP_TIMEOUT = 30.0
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 6)).astype("float32")
Y = _random.integers(0, 3, ROWS)
LOSS = "sparse_categorical_crossentropy"


def say(word: str, value: Any = "") -> None:
    """Prints a line at once, whole."""
    os.write(1, f"{word} {value}\n".encode())


def start(hidden: int = 8) -> tuple[Any, Any]:
    """Returns the strategy, over all workers or two devices, and a model."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    say("BEGIN")
    if "TF_CONFIG" not in os.environ:
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, parts)
    strategy = tmg.create_strategy(
        devices=None if "TF_CONFIG" in os.environ else 2, startup_timeout=STARTUP_TIMEOUT
    )
    say("STRATEGY")
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(hidden, "tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3, "softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    return strategy, model


def data_of(strategy: Any) -> Any:
    """Returns rows that are shuffled anew in each epoch, cut into shards."""
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=3)
    return tmg.distribute_dataset(rows.batch(BATCH), strategy)


@contextmanager
def ending(folder: str, model: Any, more: Callable[[], Any]) -> Iterator[None]:
    """Leaves what the training has made, when it has come to its end."""
    yield
    say("END")
    values = [np.asarray(one) for one in [*model.variables, *model.optimizer.variables]]
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    say("RESULT", json.dumps({"weights": digest, "numbers": len(values), "more": more()}))


def restored(checkpoints: Any) -> None:
    """Goes on from the newest checkpoint, and says from which."""
    step = checkpoints.restore()
    say("RESTORED", -1 if step is None else step)


class Progress(keras.callbacks.Callback):
    """Says how far ``fit`` is, without a call for each batch."""

    every_batches = EVERY

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called before the checkpoint of this step is saved."""
        say("STEP", int(self.model.optimizer.iterations.numpy()))


def fit(folder: str, saves: bool = True, verify: str | bool = False) -> None:
    """``tmg.fit`` with validation and metrics."""
    strategy, model = start()
    callbacks: list[Any] = [Progress()]
    data = data_of(strategy)
    if saves:
        checkpoints = tmg.Checkpoints(Path(folder) / "checkpoints", model, model.optimizer, data)
        restored(checkpoints)
        callbacks.append(checkpoints.callback(every_steps=EVERY))
        data = checkpoints.data
    history = model.history = None
    with ending(folder, model, lambda: history.history):
        history = tmg.fit(
            model,
            data,
            epochs=EPOCHS,
            callbacks=callbacks,
            verify=verify,
            validation_data=(X[:41], Y[:41]),
            validation_batch_size=16,
            verbose=0,
        )


def by_hand(
    folder: str,
    saves: bool = True,
    verify: str | bool = False,
    at_once: int = 0,
    every: int = EVERY,
) -> None:
    """A loop that calls ``step``, or ``step.run`` with ``at_once`` steps."""
    strategy, model = start()
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    step = tmg.make_train_step(
        model, model.optimizer, LOSS, strategy, metrics=[accuracy], verify=verify
    )
    data = data_of(strategy)
    numbers: Iterable[int] = range(EPOCHS)
    after: Callable[[int], None] = int  # Nobody to be told.
    if saves:
        checkpoints = tmg.Checkpoints(
            Path(folder) / "checkpoints",
            train_step=step,
            data=data,
            extra={"accuracy": accuracy},
        )
        restored(checkpoints)
        numbers, data = checkpoints.epochs(EPOCHS), checkpoints.data

        def count_and_save(steps: int) -> None:
            checkpoints.after_step(steps)
            if checkpoints.step // every > (checkpoints.step - steps) // every:
                checkpoints.save()

        after = count_and_save
    with ending(folder, model, lambda: float(accuracy.result())):
        for _ in numbers:
            if at_once:
                iterator, ran = iter(data), at_once
                while ran == at_once:
                    ran = int(step.run(iterator, at_once)["steps"])
                    say("STEP", int(model.optimizer.iterations.numpy()))
                    after(ran)
            else:
                for batch in data:
                    step(batch)
                    say("STEP", int(model.optimizer.iterations.numpy()))
                    after(1)


def run(folder: str, saves: bool = True, verify: str | bool = False) -> None:
    """A loop that calls ``step.run``."""
    by_hand(folder, saves, verify, at_once=4)


def saving(folder: str, saves: bool = True, verify: str | bool = False) -> None:
    """A loop that saves after each step, so that it does little else."""
    by_hand(folder, saves, verify, every=1)


class Memory(keras.callbacks.Callback):
    """Says after epochs what the process holds, and ends the training when its time is over."""

    def __init__(self, seconds: float) -> None:
        """Takes how long to train."""
        super().__init__()
        self._end = time.monotonic() + seconds
        self._next = 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called after validation, on all workers."""
        now = time.monotonic()
        if now > self._next:
            self._next = now + 5.0
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held = {
                "steps": int(self.model.optimizer.iterations.numpy()),
                "bytes": pages * resource.getpagesize(),
                "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
                "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
                "objects": len(gc.get_objects()),
            }
            say("MEMORY", json.dumps(held))
        self.model.stop_training = now > self._end


def soak(folder: str, seconds: float) -> None:
    """``tmg.fit`` for some minutes, with all that communicates."""
    strategy, model = start()
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).repeat(4).shuffle(4 * ROWS, seed=3)
    checkpoints = tmg.Checkpoints(
        Path(folder) / "checkpoints",
        model,
        model.optimizer,
        tmg.distribute_dataset(rows.batch(BATCH), strategy),
    )
    tmg.fit(
        model,
        checkpoints.data,
        epochs=10**6,
        callbacks=[Memory(seconds), checkpoints.callback(every_steps=50)],
        validation_data=(X[:41], Y[:41]),
        validation_batch_size=16,
        verbose=0,
    )
    say("RESULT", json.dumps({}))


def evaluate(folder: str, saves: bool = False, verify: str | bool = False) -> None:
    """Evaluates again and again."""
    _, model = start()
    with ending(folder, model, lambda: None):
        for number in range(100):
            tmg.evaluate(model, (X, Y), batch_size=BATCH)
            say("STEP", number)


def predict(folder: str, saves: bool = False, verify: str | bool = False) -> None:
    """Predicts again and again."""
    _, model = start()
    with ending(folder, model, lambda: None):
        for number in range(100):
            tmg.predict(model, X, batch_size=BATCH)
            say("STEP", number)
