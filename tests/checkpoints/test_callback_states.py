"""What callbacks remember is part of a run: saved, restored, and to the bit."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfmultigpu as tmg
from tfmultigpu.addons.checkpoints.callback_states import CallbackStates

pytestmark = [
    # Keras reads the learning rate of a strategy in this way.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(22, 1)).astype("float32")


class Killed(Exception):
    """The process is gone."""


class Kill(keras.callbacks.Callback):
    """Ends a run from outside before an epoch, or within one."""

    every_batches = 1

    def __init__(self, epoch: int, batch: int | None = None) -> None:
        super().__init__()
        self.epoch, self.batch = epoch, batch  # Arguments: not restored.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current = epoch
        if (self.epoch, self.batch) == (epoch, None):
            raise Killed

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, self.batch) == (self.current, batch):
            raise Killed


def variables(model: Any) -> list[np.ndarray]:
    return [np.array(one.numpy()) for one in (*model.variables, *model.optimizer.variables)]


def test_callbacks_are_matched_by_name_and_what_they_watch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tfmultigpu")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    class Opaque(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.thing, self.function, self.watched = object(), print, model

    def fit(epochs: int, *callbacks: Any) -> None:
        run = tmg.Checkpoints(tmp_path, model, model.optimizer)
        run.restore()
        tmg.fit(model, (X, Y), epochs=epochs, callbacks=[run.callback(), *callbacks], verbose=0)

    stopping = keras.callbacks.EarlyStopping
    first = [stopping("val_loss", patience=9), stopping("loss", patience=9), Opaque()]
    with pytest.warns(UserWarning, match="Early stopping conditioned on metric"):
        fit(2, *first)
    assert "cannot save these attributes of callbacks: Opaque.thing (object)" in (caplog.text)
    assert "function" not in caplog.text
    caplog.clear()
    # Another order, another patience, one more: none of it confuses which is which.
    second = [keras.callbacks.TerminateOnNaN(), stopping("loss", patience=5)]
    fit(3, *second)
    assert second[1].patience == 5
    assert second[1].best <= first[1].best
    assert second[1].best_epoch >= first[1].best_epoch
    assert "without the restart: EarlyStopping val_loss #0, Opaque #0\n" in caplog.text
    # Other arrays, another batch size: refused before anything is trained.
    before = model.get_weights()
    for data, size, text in (
        ((X[:20], Y[:20]), 32, "rows=20, in the checkpoint 22"),
        ((X, Y), 8, "batch_size=8, in the checkpoint 32"),
        ((X + 1, Y), 32, "digest="),
    ):
        run = tmg.Checkpoints(tmp_path, model, model.optimizer)
        run.restore()
        with pytest.raises(tmg.CheckpointError, match=text):
            tmg.fit(model, data, batch_size=size, epochs=4, callbacks=[run.callback()], verbose=0)
    for here, there in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(here, there)


class Small:
    """A small model that begins as always, and one process that trains it."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.model.compile(keras.optimizers.Adam(0.01), "mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self.start = variables(self.model)

    def fit(
        self, folder: Path, make: Any, *kill: Any, saves: int | None = 4, **options: Any
    ) -> Any:
        model = self.model
        for variable, value in zip(
            (*model.variables, *model.optimizer.variables), self.start, strict=True
        ):
            variable.assign(value)
        keras.utils.set_random_seed(8)
        run = tmg.Checkpoints(folder, model, model.optimizer)
        self.restored = run.restore()
        callbacks = make()
        options = {"epochs": 5, "batch_size": 4, "verbose": 0, "steps_per_call": 1} | options
        history = tmg.fit(
            model,
            (X, Y),
            callbacks=[*callbacks, *kill, run.callback(every_steps=saves)],
            **options,
        )
        logs = history.epoch, history.history
        return variables(model), logs, [repr(getattr(one, "seen", None)) for one in callbacks]

    def check(self, folder: Path, make: Any, *kills: Kill, **options: Any) -> None:
        whole = self.fit(folder / "whole", make, **options)
        for i, kill in enumerate(kills):
            with pytest.raises(Killed):
                self.fit(folder / str(i), make, kill, **options)
            found = self.fit(folder / str(i), make, **options)
            assert self.restored
            for here, there in zip(found[0], whole[0], strict=True):
                np.testing.assert_array_equal(here, there)
            assert found[1:] == whole[1:]


@pytest.fixture(scope="module")
def small() -> Small:
    return Small()


def test_callbacks_of_keras_are_those_of_a_run_that_was_not_interrupted(
    small: Small, tmp_path: Path
) -> None:
    def make() -> list[Any]:
        callbacks = keras.callbacks
        return [
            callbacks.EarlyStopping("loss", patience=3, min_delta=0.1, restore_best_weights=True),
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.1),
        ]

    options: dict[str, Any] = {"epochs": 30}
    # In the middle of an epoch, and after its last batch: it is ended first.
    small.check(tmp_path / "middle", make, Kill(2, 4), **options)
    small.check(tmp_path / "last", make, Kill(3, 0), saves=6, **options)
    # Ended by a callback: it stays ended, with more epochs too, and ends with the best weights.
    values, logs, _ = small.fit(tmp_path / "run", make, **options)
    assert len(logs[0]) < 30
    for epochs in (30, 60):
        again = small.fit(tmp_path / "run", make, epochs=epochs)
        assert again[1] == logs
        for here, there in zip(again[0], values, strict=True):
            np.testing.assert_array_equal(here, there)


class Begins(keras.callbacks.Callback):
    """Loads weights when training begins; resets moments, and shrinks, when an epoch does."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.set_weights([0 * one + 0.1 for one in self.model.get_weights()])
        self.model.optimizer.learning_rate = 0.03

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights([0.9 * one for one in self.model.get_weights()])
        for one in self.model.optimizer.variables[2:]:
            one.assign(one * 0)


def test_what_callbacks_do_when_they_begin_is_not_done_twice(small: Small, tmp_path: Path) -> None:
    plateau = keras.callbacks.ReduceLROnPlateau

    def make() -> list[Any]:
        return [Begins(), plateau("loss", min_delta=10.0, patience=1, factor=0.1)]

    # In the middle of an epoch, and at an epoch's end, where the next one's beginning is new.
    small.check(tmp_path / "middle", make, Kill(2, 3))
    small.check(tmp_path / "end", make, Kill(3, 1), saves=None)


def test_epochs_are_those_of_fit(small: Small, tmp_path: Path) -> None:
    options: dict[str, Any] = {"initial_epoch": 2}
    small.check(tmp_path / "middle", list, Kill(3, 2), Kill(2, 5), **options)
    small.check(tmp_path / "end", list, Kill(4, 1), saves=None, **options)
    # Its first epoch is known; what is said again may be another.
    again = small.fit(tmp_path / "end" / "0", list, initial_epoch=0, epochs=6)
    assert again[1][0] == [2, 3, 4, 5]


def test_what_cannot_be_saved_is_named_once(
    small: Small, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Holds(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.inner = [keras.callbacks.EarlyStopping("loss")]
            self.recent: deque[int] = deque(maxlen=2)
            self.late: Any = None
            # Without a state: no word about them.
            self.function, self.shape = print, (2, 3)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.late = object()

    def make() -> list[Any]:
        return [Holds(), keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)]

    small.fit(tmp_path, make, epochs=3, saves=1)
    text = (
        "these attributes of callbacks: Holds.inner (EarlyStopping), Holds.recent (deque). "
        "A resumed run starts with new ones. Write state(), which "
    )
    assert caplog.text.count(text) == 1
    assert caplog.text.count("Holds.inner") == caplog.text.count("Holds.late (object)") == 1
    for name in ("function", "shape", "LearningRateScheduler"):
        assert f"{name} (" not in caplog.text
    # Nothing of it stands in the way of a resumed run.
    small.fit(tmp_path, make, epochs=4)
    assert small.restored == 18


def test_a_state_that_cannot_be_saved_is_an_error(small: Small, tmp_path: Path) -> None:
    class Returns(keras.callbacks.Callback):
        def state(self) -> Any:
            return {"thing": object()}

        def set_state(self, state: Any) -> None:
            pass

    with pytest.raises(
        tmg.CheckpointError, match=r"Received: object from state\(\) of Returns #0\."
    ):
        small.fit(tmp_path, lambda: [Returns()])


def test_attributes_named_like_a_parameter_are_not_state() -> None:
    class Limited(keras.callbacks.Callback):
        def __init__(self, limit: int) -> None:
            super().__init__()
            self._limit, self.double, self.functions, self.seen = limit, 2 * limit, [print], []

    states = CallbackStates([Limited(3), Limited(4)]).read({})
    assert states["Limited #0"] == {"double": 6, "seen": []}
    assert states["Limited #1"] == {"double": 8, "seen": []}
