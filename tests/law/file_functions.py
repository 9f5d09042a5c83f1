"""Functions that write files on every worker, called in worker processes (law/processes.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from law import worker_functions
from law.model import regression, small

EPOCHS = 2
ROWS = 10
callbacks = keras.callbacks
_kept: dict[str, Any] = {}


def compiled(*layers: Any) -> Any:
    """Returns the model of each run, on the strategy of the workers or on one device."""
    keras.utils.set_random_seed(1)
    training = small()
    model = keras.Sequential(
        [keras.Input((4,), dtype="float64"), *layers, *training.model.layers], name="saved"
    )
    model.compile(training.optimizer, training.loss)
    return model


def on_workers(make: Callable[[], Any]) -> Any:
    with worker_functions.joined["strategy"].scope():
        return make()


def data() -> tuple[np.ndarray, np.ndarray]:
    ((x, y),) = regression([ROWS])
    return x, y


def train(model: Any, *used: Any) -> None:
    options = {"batch_size": 4, "epochs": EPOCHS, "shuffle": False, "verbose": 0, "verify": False}
    tmg.fit(model, *data(), callbacks=used, **options)


class Writes(callbacks.Callback):
    """A callback of a user that writes to a folder."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.log_dir = log_dir


def writers() -> dict[str, Callable[[Any], Any]]:
    """Returns each kind of callback that writes, by the name of the file that it is given."""
    return {
        "{epoch}.keras": callbacks.ModelCheckpoint,
        "{epoch}.weights.h5": lambda p: callbacks.ModelCheckpoint(p, save_weights_only=True),
        "losses.csv": callbacks.CSVLogger,
        "events": callbacks.TensorBoard,
        "of a user": lambda path: Writes(Path(path)),
    }


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def told(model: Any, *used: Any) -> str:
    """Returns the ClusterError of a fit, which has trained nothing; or nothing."""
    steps = int(model.optimizer.iterations.numpy())
    error: Exception | None = None
    try:
        train(model, *used)
    except (tmg.errors.TfMultiGpuError, tf.errors.OpError, OSError) as raised:
        error = raised
    if error is None:
        return ""
    # Whoever called compares the text: what is raised in a worker is no assertion there.
    if int(model.optimizer.iterations.numpy()) != steps:
        return f"after training: {error}"
    return str(error) if isinstance(error, tmg.errors.ClusterError) else repr(error)


def one_path_for_all(folder: str) -> dict[str, str]:
    """Returns what each callback is told that writes on all workers to one path."""
    model = on_workers(compiled)
    first = tmg.workers.is_first()
    errors = {name: told(model, make(f"{folder}/{name}")) for name, make in writers().items()}
    with inside(Path(folder)):
        errors["relative"] = told(model, callbacks.CSVLogger("losses.csv"))
    link = Path(folder, "link") if first else Path(folder, "new", "..")
    errors["by a link"] = told(model, callbacks.CSVLogger(link / "losses.csv"))
    # One of two callbacks, and another one on the other worker.
    one = [callbacks.CSVLogger(f"{folder}/{name}.csv") for name in ("all", f"of {first}")]
    errors["one of two"] = told(model, *one[:: 1 if first else -1])
    return errors


def run_the_lines(folder: str, message: str) -> list[np.ndarray] | str:
    """Trains with each of the two lines that the message tells to write.

    Returns:
        The weights; or the error of the first line.
    """
    line = re.search(r"Write filepath=(tmg\.workers\.own_path\('.*?'\))", message)
    alone = re.search(r"callbacks=(\[callback\] if .*? else \[\])", message)
    assert line is not None
    assert alone is not None

    model = on_workers(compiled)
    paths = {name: tmg.workers.own_path(f"{folder}/{name}") for name in writers()}
    paths["{epoch}.keras"] = eval(line[1], {"tmg": tmg})
    # A file of each worker, in folders that both have.
    own = Path(folder, "first" if tmg.workers.is_first() else "second")
    own.mkdir(exist_ok=True)
    used = [make(paths[name]) for name, make in writers().items()]
    error = told(model, *used, callbacks.CSVLogger(own / "losses.csv"))
    if error:
        return error

    again = on_workers(compiled)
    callback = callbacks.ModelCheckpoint(f"{folder}/alone-{{epoch}}.keras")
    train(again, *eval(alone[1], {"tmg": tmg, "callback": callback}))
    return model.get_weights()


class CountsRows(keras.layers.Layer):
    """Counts the rows of its replica; whoever reads the variable adds all of them."""

    def build(self, shape: Any) -> None:
        shared = {"aggregation": "sum", "synchronization": "on_read"}
        self.rows = keras.Variable(0.0, trainable=False, dtype="float64", name="rows", **shared)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.rows.assign(self.rows + keras.ops.cast(keras.ops.shape(x)[0], "float64"))
        return x


def saved_by_all(folder: str) -> dict[str, Any]:
    """Saves a model that only all workers can save, after training and by a callback."""
    model = on_workers(lambda: compiled(CountsRows(dtype="float64")))
    best = callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="loss")
    error = told(model, *([best] if tmg.workers.is_first() else []))
    line = re.search(r"ModelCheckpoint\((tmg\.workers\.own_path\(.*?\))\)", error)
    assert line is not None, error
    with inside(Path(folder)):
        train(model, callbacks.ModelCheckpoint(eval(line[1], {"tmg": tmg})))

    path = tmg.workers.own_path(f"{folder}/after.keras")
    model.save(path)
    model.save_weights(tmg.workers.own_path(f"{folder}/after.weights.h5"))
    model.export(tmg.workers.own_path(f"{folder}/exported"), verbose=False)
    # Each worker can read what it has written, at once.
    kinds = {"CountsRows": CountsRows}
    read = keras.saving.load_model(path, custom_objects=kinds, compile=False)
    return {"error": error, "weights": model.get_weights(), "read": read.get_weights()}


def keep_a_model() -> None:
    """Makes a model while both workers are there."""
    _kept["model"] = on_workers(compiled)


def evaluate_it() -> None:
    tmg.evaluate(_kept["model"], *data(), verbose=0)
