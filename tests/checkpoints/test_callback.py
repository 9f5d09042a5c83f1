"""Checkpoints as a callback of fit."""

from __future__ import annotations

import os
import signal
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of

import tfmultigpu as tmg
from tfmultigpu.accumulation.update import update_of
from tfmultigpu.addons.checkpoints.callback import CheckpointCallback
from tfmultigpu.data.positioned import Position

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(22, 1)).astype("float32")
EPOCHS = 3


class Killed(Exception):
    """The process is gone."""


class Kill(keras.callbacks.Callback):
    """Ends a run from outside after some batches in all."""

    every_batches = 1

    def __init__(self, after: int | None, how: Any = Killed) -> None:
        super().__init__()
        self.left = after
        self.how = how

    def state(self) -> None:
        """The next one counts from its beginning."""

    def set_state(self, state: None) -> None:
        """Keeps its own."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                if self.how is Killed:
                    raise Killed
                os.kill(os.getpid(), self.how)


@pytest.fixture(scope="module")
def model() -> Any:
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dropout(0.3, seed=1), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def variables(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


@pytest.fixture(scope="module")
def start(model: Any) -> list[np.ndarray]:
    return [np.array(variable.numpy()) for variable in variables(model)]


def fit(
    model: Any,
    start: list[np.ndarray],
    directory: Path,
    kind: str,
    kill: Kill | None = None,
    **saves: int,
) -> tuple[int | None, list[np.ndarray], Any]:
    """One process: the model begins as it always does, and fit goes on from what is saved."""
    for variable, value in zip(variables(model), start, strict=True):
        variable.assign(value)
    keras.utils.set_random_seed(8)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).batch(4)
    sources = {
        "dataset": data,
        "unknown length": data.filter(lambda x, y: True),
        "arrays": None,
    }
    run = tmg.Checkpoints(directory, model, model.optimizer, sources[kind])
    restored = run.restore()
    history = tmg.fit(
        model,
        (X, Y) if run.data is None else run.data,
        batch_size=4 if run.data is None else None,
        epochs=EPOCHS,
        callbacks=[run.callback(**saves), *([kill] if kill else [])],
        verbose=0,
    )
    return restored, [np.array(variable.numpy()) for variable in variables(model)], history


def names(directory: Path) -> list[str]:
    return sorted(path.name.removesuffix(".npz") for path in directory.iterdir())


@pytest.mark.parametrize("kind", ["arrays", "unknown length"])
def test_fit_goes_on_in_the_middle_of_an_epoch_to_the_bit(
    kind: str, model: Any, start: list[np.ndarray], tmp_path: Path
) -> None:
    _, expected, whole = fit(model, start, tmp_path / "whole", kind)
    assert names(tmp_path / "whole") == ["step-00000006", "step-00000012", "step-00000018"]
    directory = tmp_path / "run"
    with pytest.raises(Killed):
        fit(model, start, directory, kind, Kill(10), every_steps=4)
    assert names(directory) == ["step-00000004", "step-00000008"]
    restored, values, history = fit(model, start, directory, kind, every_steps=5)
    assert restored == 8
    for here, there in zip(values, expected, strict=True):
        np.testing.assert_array_equal(here, there)
    # What the callbacks remember is part of the run, and so is its history.
    assert history.epoch == whole.epoch == [0, 1, 2]
    # As many steps in a call as pay: their losses are added in another order.
    assert history.history["loss"] == pytest.approx(whole.history["loss"], abs=1e-6)
    assert names(directory) == ["step-00000008", "step-00000010", "step-00000015"]


def test_a_second_fit_needs_checkpoints_of_its_own(model: Any, tmp_path: Path) -> None:
    run = tmg.Checkpoints(tmp_path, model, model.optimizer)
    options = {"epochs": 1, "callbacks": [run.callback()], "verbose": 0}
    tmg.fit(model, X, Y, **options)
    with pytest.raises(tmg.CheckpointError, match=r"call checkpoints\.restore\(\) again"):
        tmg.fit(model, X, Y, **options)
    assert run.restore() is not None
    assert tmg.fit(model, X, Y, **{**options, "epochs": 2}).epoch == [0, 1]


def test_an_update_that_is_sharded_is_so_after_a_restart(tmp_path: Path) -> None:
    strategy = strategy_of(2)
    restored: Any = None

    def train(directory: str, kill: Kill | None = None) -> list[np.ndarray]:
        nonlocal restored
        keras.utils.set_random_seed(8)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).batch(4)
        run = tmg.Checkpoints(tmp_path / directory, model, model.optimizer, data)
        restored = run.restore()
        callbacks = [run.callback(every_steps=4), *([kill] if kill else [])]
        if restored is not None:
            assert update_of(model.optimizer).owned  # As the run was that is resumed.
            assert int(model.optimizer.iterations.numpy()) == restored == run.step
        tmg.fit(model, run.data, epochs=2, shard_update=True, callbacks=callbacks, verbose=0)
        return [np.array(one.numpy()) for one in variables(model)]

    expected = train("whole")
    for batches in (5, 5):  # Twice: what is saved then was built after it had been restored.
        with pytest.raises(Killed):
            train("run", Kill(batches))
    found = train("run")
    assert restored == 8
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_array_equal(here, there)
    # Another optimizer is refused at once.
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adamax(0.01), "mse")
    with pytest.raises(tmg.CheckpointError, match="another model, optimizer or loss scale"):
        tmg.Checkpoints(tmp_path / "run", model, model.optimizer).restore()
    # Whoever saves before a step saves what was restored.
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
    run = tmg.Checkpoints(tmp_path / "run", model, model.optimizer)
    assert run.restore() == 12
    run.save()
    assert model.optimizer.built
    own = model.optimizer.variables  # The weights were replaced by their averages at the end.
    for here, there in zip(own, expected[len(model.variables) :], strict=True):
        np.testing.assert_array_equal(here.numpy(), there)


def test_a_signal_after_the_last_step_goes_to_the_earlier_handler(
    model: Any, start: list[np.ndarray], tmp_path: Path
) -> None:
    class Late(Kill):
        def on_train_end(self, logs: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []

    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        fit(model, start, tmp_path, "dataset", Late(None))
        assert received == [signal.SIGTERM]
        # The run saves and exits for it: then it is not sent again.
        with pytest.raises(SystemExit):
            fit(model, start, tmp_path / "run", "dataset", Kill(8, signal.SIGTERM))
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_data_than_that_of_the_checkpoints_is_refused(model: Any, tmp_path: Path) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    run = tmg.Checkpoints(tmp_path, model, model.optimizer, data)
    with pytest.raises(tmg.CheckpointError, match=r"a new pass over checkpoints\.data"):
        tmg.fit(model, data, callbacks=[run.callback()], verbose=0)


def test_epochs_that_are_no_passes_are_refused(model: Any, tmp_path: Path) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()
    run = tmg.Checkpoints(tmp_path, model, model.optimizer, data)
    with pytest.raises(
        tmg.errors.DataError, match=r"steps_per_epoch=3 and.*data=lambda epoch: dataset\.shuffle"
    ):
        tmg.fit(model, run.data, steps_per_epoch=3, callbacks=[run.callback()], verbose=0)


def test_several_workers_are_told_after_the_same_steps() -> None:
    class Run:
        """Also its own variables, and an exchange with others."""

        step = 0

        def __init__(self, workers: int) -> None:
            self.told: list[int] = []
            self.exchange, self.workers = self, workers

        def after_step(self, steps: int) -> None:
            self.told.append(steps)

        def end_epoch(self, steps: int) -> None:
            self.told += [steps, -1]

        def listen(self) -> None:
            """Does nothing."""

        save = listen

        def check_holds(self, changed: Any) -> None:
            """Does nothing."""

    def told(workers: int) -> list[int]:
        run: Any = Run(workers)
        fit: Any = types.SimpleNamespace(
            batches=0, callbacks=[], seed=0, first_epoch=0, changed_variables=list
        )
        callback = CheckpointCallback(run, Position(), run)
        callback.on_fit_begin(fit)
        callback.on_train_begin()
        for epoch in range(2):
            callback.on_epoch_begin(epoch)
            # Besides after each tenth step of all, fit calls when time has passed.
            for batch in ((3, 9, 14), (4, 6, 14, 15))[epoch]:
                fit.batches = 15 * epoch + batch + 1
                callback.on_train_batch_end(batch)
            callback.on_epoch_end(epoch)
        return run.told

    assert told(2) == [10, 5, -1, 5, 10, 1, -1]
    assert told(1) == [4, 6, 5, 0, -1, 5, 2, 8, 1, 0, -1]
    several, single = (CheckpointCallback(*[Run(n), Position(), Run(n)]) for n in (2, 1))
    for every, batches in ((None, 10), (4, 4), (400, 10)):
        several.every_steps = single.every_steps = every
        assert (several.every_batches, single.every_batches) == (batches, every)
