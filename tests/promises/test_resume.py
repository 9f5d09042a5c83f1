"""A run that is killed and resumed by ``Checkpoints`` is, bit for bit, one that never was."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import FLOAT
from law.pair import strategy_of
from law.plain import assert_values
from law.processes import pool

import tfmultigpu as tmg

layers = keras.layers
_random = np.random.default_rng(17)
# Six batches a pass, the last one of one row; every pass in another order.
ROWS, SIZE, EPOCHS, STEPS = 21, 4, 3, 18
X = _random.normal(size=(ROWS, 4))
Y = X @ _random.normal(size=(4, 2))
OVERFLOW = 1e308  # Of this label, the gradient of its batch is infinite.


pytestmark = pytest.mark.usefixtures("float64")


def read(overflow: bool = False) -> tf.data.Dataset:
    """The data of a run, built anew: shuffled again in each pass."""
    y = Y.copy()
    y[5] = OVERFLOW if overflow else y[5]
    dataset = tf.data.Dataset.from_tensor_slices((X, y))
    return dataset.shuffle(ROWS, seed=3).batch(SIZE)


class Run:
    """What a process builds before it restores: model, optimizer, data, checkpoints."""

    def __init__(self, directory: Path, replicas: int, seed: int, overflow: bool = False) -> None:
        keras.utils.set_random_seed(5)  # For the data.
        random.seed(seed)  # Nothing else may depend on it: Keras draws weights and seeds from it.
        self.strategy = strategy_of(replicas)
        with self.strategy.scope():
            self.model = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(5, "tanh"),
                    layers.BatchNormalization(synchronized=True, epsilon=0.1),
                    layers.Dropout(0.3),
                    layers.Dense(2),
                ]
            )
            self.optimizer = keras.optimizers.Adam(
                0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4
            )
            self.loss = keras.losses.MeanSquaredError(**FLOAT)
            self.model.compile(self.optimizer, self.loss, metrics=["mae"])
        self.checkpoints = tmg.Checkpoints(
            directory, model=self.model, optimizer=self.optimizer, data=read(overflow)
        )
        self.restored = self.checkpoints.restore()

    def values(self) -> list[np.ndarray]:
        """All variables, as every replica has them."""
        return [
            local.numpy()
            for variable in [*self.model.variables, *self.optimizer.variables]
            for local in self.strategy.experimental_local_results(variable.value)
        ]

    def names(self) -> list[str]:
        return [
            variable.path
            for variable in [*self.model.variables, *self.optimizer.variables]
            for _ in self.strategy.experimental_local_results(variable.value)
        ]


# A loop by hand -----------------------------------------------------------------------------------


def train(run: Run, copies: Any = None, end: Any = None) -> list[list[float]]:
    """The loop of a program: saves each third step; returns the logs of each step.

    Args:
        run: The run.
        copies: Called with the number of steps done, after each.
        end: The steps after which the process is killed.
    """
    step = tmg.make_train_step(
        run.model, run.optimizer, run.loss, run.strategy, loss_scale="dynamic", verify=False
    )
    logs, done = [], run.restored or 0
    for _ in run.checkpoints.epochs(EPOCHS):
        for batch in run.checkpoints.data:
            found = step(batch)
            logs.append([float(found[n]) for n in ("loss", "weight", "skipped", "loss_scale")])
            run.checkpoints.after_step()
            done += 1
            if done % 3 == 0:
                run.checkpoints.save()
            if copies is not None:
                copies(done)
            if done == end:
                os.kill(os.getpid(), signal.SIGKILL)
    return logs


@functools.cache
def uninterrupted(replicas: int) -> tuple[Run, list[list[float]], list[Path], list[np.ndarray]]:
    """A whole run, its logs, its directory as it was after each step, and its end."""
    root = Path(tempfile.mkdtemp(prefix="resume-"))
    copies = [root / "0"]

    def copy(done: int) -> None:
        copies.append(root / str(done))
        shutil.copytree(root / "run", copies[-1])

    copies[0].mkdir()
    run = Run(root / "run", replicas, seed=5, overflow=True)
    return run, train(run, copy), copies, run.values()


# Fails if a variable, a seed, a slot, an average, the scale of the loss, the place in the data or
# the number of the pass is not restored, or is that of one replica on all.
@pytest.mark.parametrize(("replicas", "killed"), [(1, 5), (3, 13)])
def test_a_loop_resumed_from_any_step_ends_with_the_same_bits(
    replicas: int, killed: int, tmp_path: Path
) -> None:
    whole, logs, copies, end = uninterrupted(replicas)
    assert any(skipped for *_, skipped, _ in logs[: killed - killed % 3])  # The scale has changed.
    shutil.copytree(copies[killed], tmp_path / "run")
    run = Run(tmp_path / "run", replicas, seed=99, overflow=True)
    assert run.restored == killed - killed % 3
    assert train(run) == logs[run.restored :]
    for name, ours, truth in zip(run.names(), run.values(), end, strict=True):
        np.testing.assert_array_equal(ours, truth, name)
    assert whole.restored is None


# Fails if what was saved can be read by as many replicas alone, or is added over them.
@pytest.mark.parametrize(("of", "on"), [(3, 2), (1, 3)])
def test_a_run_resumes_on_another_number_of_replicas(of: int, on: int, tmp_path: Path) -> None:
    whole, logs, copies, _ = uninterrupted(of)
    shutil.copytree(copies[10], tmp_path / "run")
    run = Run(tmp_path / "run", on, seed=99, overflow=True)
    assert run.restored == 9
    np.testing.assert_allclose(train(run), logs[9:], rtol=5e-7)  # Logs are float32.
    pairs = [[variable.numpy() for variable in r.model.variables] for r in (run, whole)]
    assert_values(*pairs, [variable.path for variable in whole.model.variables])


# Fit ----------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


class Own(keras.callbacks.Callback):
    """Remembers by a plain attribute, and by ``state``; both change the training."""

    def __init__(self, killed: int | None = None) -> None:
        super().__init__()
        self.rates: list[float] = [0.02]
        self._hidden, self._killed = iter(()), killed
        self._best, self._batches = np.inf, 0

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "batches": self._batches, "rates": self.rates}

    def set_state(self, state: dict[str, Any]) -> None:
        self._best, self._batches = state["best"], state["batches"]
        self.rates = list(state["rates"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches == self._killed:
            raise Killed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs["loss"] < self._best:
            self._best = logs["loss"]
            self.rates.append(self.rates[-1] * 0.9 + 1e-4 * self._batches)
        self.model.optimizer.learning_rate = self.rates[-1]


class Counting(keras.callbacks.Callback):
    """Remembers by a plain attribute alone, which changes the training."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        pass

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if self.epochs == 2:
            self.model.optimizer.learning_rate = 0.005


def fit(
    directory: Path, replicas: int, seed: int, killed: int | None = None, arrays: bool = False
) -> tuple[Any, ...]:
    run = Run(directory, replicas, seed)
    checkpoints, validation = run.checkpoints, read()  # Other rows after each epoch.
    if arrays:  # Shuffled by fit, in an order that the program does not choose.
        checkpoints = tmg.Checkpoints(directory, model=run.model, optimizer=run.optimizer)
        assert checkpoints.restore() == run.restored
        tf.random.set_seed(seed)
    callbacks = [Own(killed), Counting(), checkpoints.callback(every_steps=2)]
    history = tmg.fit(
        run.model,
        (X, Y) if arrays else checkpoints.data,
        batch_size=SIZE if arrays else None,
        validation_data=validation,
        validation_steps=2,
        epochs=EPOCHS,
        callbacks=callbacks,
        verbose=0,
    )
    return run, history.history, callbacks


# Fails if fit begins its epoch again, forgets the first part of its losses or metrics, shuffles
# arrays in another order, validates with the rows of another epoch, or if a callback forgets what
# it had seen.
@pytest.mark.parametrize("arrays", [pytest.param(False, marks=pytest.mark.more), True])
def test_fit_resumed_in_an_epoch_ends_with_the_same_bits(tmp_path: Path, arrays: bool) -> None:
    replicas, killed = 3, 9
    whole, history, callbacks = fit(tmp_path / "whole", replicas, seed=5, arrays=arrays)
    with pytest.raises(Killed):
        fit(tmp_path / "killed", replicas, seed=5, killed=killed, arrays=arrays)
    resumed, resumed_history, resumed_callbacks = fit(
        tmp_path / "killed", replicas, seed=99, arrays=arrays
    )
    assert resumed.restored == 8  # The step after it was lost.
    for name, ours, truth in zip(whole.names(), resumed.values(), whole.values(), strict=True):
        np.testing.assert_array_equal(ours, truth, name)
    assert resumed_history == history
    assert resumed_callbacks[0].state() == callbacks[0].state()
    assert len(callbacks[0].rates) > 2  # Else what it remembers does not matter.
    assert resumed_callbacks[1].epochs == callbacks[1].epochs == EPOCHS


# Kills and damage ---------------------------------------------------------------------------------


def train_until_killed(directory: Path, end: int) -> None:
    """For a process of its own."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    train(Run(directory, 2, seed=5, overflow=True), end=end)


# Fails if a checkpoint is whole only once the process has ended by itself.
def test_a_killed_process_is_resumed_in_this_one(tmp_path: Path) -> None:
    _, logs, _, end = uninterrupted(2)
    worker = pool().start()
    worker.begin(train_until_killed, tmp_path / "run", 7)
    assert worker.wait() == -signal.SIGKILL
    run = Run(tmp_path / "run", 2, seed=99, overflow=True)
    assert run.restored == 6
    assert train(run) == logs[6:]
    for name, ours, truth in zip(run.names(), run.values(), end, strict=True):
        np.testing.assert_array_equal(ours, truth, name)


class Saved:
    """A model that is saved without training: each step adds one to all of it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        with strategy_of(2).scope():
            self.model = keras.Sequential([keras.Input((30,)), layers.Dense(40)])
            self.optimizer = keras.optimizers.SGD(0.1)
            self.optimizer.build(self.model.trainable_variables)
        self.directory = directory
        self.checkpoints = tmg.Checkpoints(
            directory, model=self.model, optimizer=self.optimizer, **options
        )

    def save(self) -> list[Path]:
        """Trains a step and saves; returns the new files, the largest one last."""
        before = set(self.directory.rglob("*"))
        self.set(int(self.optimizer.iterations.numpy()) + 1)
        self.checkpoints.save()
        new = [path for path in set(self.directory.rglob("*")) - before if path.is_file()]
        return sorted(new, key=lambda path: path.stat().st_size)

    def set(self, step: int) -> None:
        self.optimizer.iterations.assign(step)
        for variable in self.model.variables:
            variable.assign(np.full(variable.shape, float(step)))

    def shown(self) -> set[float]:
        values = {float(value) for v in self.model.variables for value in np.ravel(v.numpy())}
        return values | {float(self.optimizer.iterations.numpy())}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# Fails if a damaged checkpoint is restored, in part or whole, ends the run, or is passed over
# without a word; or if with none left a run begins anew as if there had been none.
@pytest.mark.parametrize("damage", [truncate, flip])
def test_the_newest_whole_checkpoint_is_used(damage: Any, tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    files = [saved.save() for _ in range(3)]
    damage(files[2][-1])
    after = Saved(tmp_path)
    with pytest.warns(UserWarning, match="3"):
        assert after.checkpoints.restore() == 2
    assert after.shown() == {2.0}
    damage(files[0][-1])
    damage(files[1][-1])
    last = Saved(tmp_path)
    last.set(7)
    with (
        pytest.warns(UserWarning, match="checkpoint"),
        pytest.raises(tmg.errors.TfMultiGpuError),
    ):
        last.checkpoints.restore()
    assert last.shown() == {7.0}


# Fails if another number of checkpoints, or the oldest ones, are kept.
def test_the_newest_are_kept(tmp_path: Path) -> None:
    for keep, left in ((None, 3), (1, 1)):
        directory = tmp_path / str(keep)
        saved = Saved(directory, **({} if keep is None else {"keep": keep}))
        assert saved.checkpoints.restore() is None
        for _ in range(5):
            saved.save()
        assert len(list(directory.glob("step-*"))) == left
        after = Saved(directory)
        assert (after.checkpoints.restore(), after.shown()) == (5, {5.0})
