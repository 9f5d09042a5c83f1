"""Trains in processes that are killed again and again, and prints what is left in the end.

TensorFlow is imported once: each training runs in a copy of this process, made before TensorFlow
starts its devices.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfmultigpu as tmg
from tfmultigpu.addons.checkpoints import files

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(22, 1)).astype("float32")
EPOCHS = 4


def train(directory: Path, before_step: Callable[[int], None]) -> None:
    """Trains to the end of all epochs; leaves the weights beside the checkpoints."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tmg.create_strategy(devices=2)
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
    step = tmg.make_train_step(model, optimizer, "mse", strategy)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).batch(4)
    run = tmg.Checkpoints(directory, train_step=step, data=data, every_steps=2)
    run.restore()
    for _ in run.epochs(EPOCHS):
        for batch in run.data:
            before_step(run.step)
            step(batch)
            run.after_step()
    values = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    np.savez(directory / "values.npz", *values)


def kill_at(step: int) -> Callable[[int], None]:
    def kill(done: int) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def kill_while_saving(step: int) -> Callable[[int], None]:
    """Before the file with the arrays gets its name."""

    def arm(done: int) -> None:
        if done >= step:
            files.os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)

    return arm


def stop_at(step: int) -> Callable[[int], None]:
    def stop(done: int) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def in_a_copy(directory: Path, before_step: Callable[[int], None]) -> dict[str, object]:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(directory, before_step)
            status = 0
        except SystemExit as ended:
            status = ended.code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    left = sorted(path.name for path in directory.iterdir())
    return {"code": os.waitstatus_to_exitcode(status), "left": left}


root = Path(tempfile.mkdtemp(dir=sys.argv[1]))
whole, often = root / "whole", root / "often"
whole.mkdir()
often.mkdir()
plan = [kill_at(5), kill_while_saving(9), stop_at(15), lambda done: None]
result = {
    "whole": in_a_copy(whole, lambda done: None),
    "often": [in_a_copy(often, before_step) for before_step in plan],
}
with np.load(whole / "values.npz") as one, np.load(often / "values.npz") as other:
    result["names"] = [len(one.files), len(other.files)]
    result["equal"] = [one[name].tobytes() == other[name].tobytes() for name in one.files]
print("RESULT", json.dumps(result))
