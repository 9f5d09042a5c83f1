"""Checkpoints as a callback of fit; what other callbacks remember is part of the run."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of
from problems import network

import tfmultigpu as tmg
from tfmultigpu.accumulation.update import update_of

pytestmark = [
    # Keras reads the learning rate of a strategy in this way.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(22, 1)).astype("float32")
callbacks = keras.callbacks


class Killed(Exception):
    """The process is gone."""


class Kill(callbacks.Callback):
    """Ends a run after some batches of this process, or sends it a signal."""

    def __init__(self, batches: int, number: int | None = None) -> None:
        super().__init__()
        self.batches, self.number = batches, number

    def state(self) -> None:
        """The next process counts from its own beginning."""

    def set_state(self, state: None) -> None:
        """Keeps its own."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches -= 1
        if self.batches == 0 and self.number is None:
            raise Killed
        if self.batches == 0:
            os.kill(os.getpid(), self.number)


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=3).batch(4)


def values(model: Any) -> list[np.ndarray]:
    return [np.array(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]


def assert_same_bits(ours: list[np.ndarray], truth: list[np.ndarray]) -> None:
    for here, there in zip(ours, truth, strict=True):
        np.testing.assert_array_equal(here, there)


class Small:
    """A small model that begins as always, and processes that train it: six batches an epoch."""

    def __init__(self) -> None:
        dropout = keras.layers.Dropout(0.3, seed=1)
        self.model = network(4, dropout, keras.layers.Dense(1))
        # A metric that makes its variables in its first update.
        self.model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[keras.metrics.R2Score()])
        self.model.optimizer.build(self.model.trainable_variables)
        self.start = values(self.model)

    def fit(
        self, folder: Path, make: Callable[[], list[Any]] = list, *kill: Any,
        saves: int | None = 4, data: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """One process; returns the values at its end, its history, and what callbacks saw."""
        for variable, value in zip(
            (*self.model.variables, *self.model.optimizer.variables), self.start, strict=True
        ):
            variable.assign(value)
        keras.utils.set_random_seed(8)  # tf.data shuffles by it, too.
        run = tmg.Checkpoints(folder, self.model, self.model.optimizer, data and data())
        self.restored = run.restore()
        made = make()
        options = {"epochs": 5, "verbose": 0, "steps_per_call": 1} | options
        history = tmg.fit(
            self.model,
            (X, Y) if data is None else run.data,
            batch_size=4 if data is None else None,
            callbacks=[*made, *kill, run.callback(every_steps=saves)],
            **options,
        )
        seen = [repr(getattr(callback, "seen", None)) for callback in made]
        return values(self.model), (history.epoch, history.history), seen

    def check(self, folder: Path, make: Any, *kills: int, **options: Any) -> None:
        """Holds that a run killed after each of some numbers of batches is as one that was not."""
        truth = self.fit(folder / "whole", make, **options)
        for batches in kills:
            with pytest.raises(Killed):
                self.fit(folder / str(batches), make, Kill(batches), **options)
            resumed = self.fit(folder / str(batches), make, **options)
            assert self.restored
            assert_same_bits(resumed[0], truth[0])
            assert resumed[1:] == truth[1:]


@pytest.fixture(scope="module")
def small() -> Small:
    return Small()


def names(directory: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in directory.iterdir())


def test_data_of_unknown_length_and_another_number_of_steps_between_saves(
    small: Small, tmp_path: Path
) -> None:
    def data() -> tf.data.Dataset:
        return shuffled().filter(lambda x, y: True)

    auto: dict[str, Any] = {"epochs": 3, "steps_per_call": "auto"}
    truth, logs, _ = small.fit(tmp_path / "whole", data=data, saves=None, **auto)
    assert names(tmp_path / "whole") == [6, 12, 18]
    with pytest.raises(Killed):
        small.fit(tmp_path / "run", list, Kill(10), data=data, **auto)
    assert names(tmp_path / "run") == [4, 8]
    resumed, resumed_logs, _ = small.fit(tmp_path / "run", data=data, saves=5, **auto)
    assert small.restored == 8
    assert_same_bits(resumed, truth)
    assert resumed_logs[0] == logs[0] == [0, 1, 2]
    # As many steps in a call as pay: their losses are added in another order.
    assert resumed_logs[1]["loss"] == pytest.approx(logs[1]["loss"], abs=1e-6)
    assert names(tmp_path / "run") == [8, 10, 15]


def test_a_call_that_fails_does_not_use_up_what_was_restored(small: Small, tmp_path: Path) -> None:
    run = tmg.Checkpoints(tmp_path, small.model, small.model.optimizer)
    options = {"epochs": 1, "callbacks": [run.callback()], "verbose": 0}
    tmg.fit(small.model, X, Y, **options)
    assert run.restore() is not None
    with pytest.raises(tmg.errors.DataError, match="validation_split"):
        tmg.fit(small.model, X, Y, validation_split=2.0, **{**options, "epochs": 2})
    assert tmg.fit(small.model, X, Y, **{**options, "epochs": 2}).epoch == [0, 1]


def test_an_update_that_is_sharded_is_so_after_a_restart(tmp_path: Path) -> None:
    strategy = strategy_of(2)
    restored: Any = None

    def build() -> Any:
        keras.utils.set_random_seed(8)
        with strategy.scope():
            model = network(4, keras.layers.Dense(1))
            model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse")
        return model

    def train(directory: str, *kill: Kill) -> list[np.ndarray]:
        nonlocal restored
        model = build()
        run = tmg.Checkpoints(tmp_path / directory, model, model.optimizer, shuffled())
        restored = run.restore()
        if restored is not None:
            assert update_of(model.optimizer).owned  # As the run was that is resumed.
            assert int(model.optimizer.iterations.numpy()) == restored == run.step
        used = [run.callback(every_steps=4), *kill]
        tmg.fit(model, run.data, epochs=2, shard_update=True, callbacks=used, verbose=0)
        return values(model)

    truth = train("whole")
    for _ in range(2):  # Twice: what is saved then was built after it had been restored.
        with pytest.raises(Killed):
            train("run", Kill(5))
    assert_same_bits(train("run"), truth)
    assert restored == 8
    # Whoever saves before a step saves what was restored.
    model = build()
    run = tmg.Checkpoints(tmp_path / "run", model, model.optimizer)
    assert run.restore() == 12
    run.save()
    # The weights were replaced by their averages at the end.
    assert_same_bits(values(model)[len(model.variables) :], truth[len(model.variables) :])


def test_a_signal_after_the_last_step_goes_to_the_earlier_handler(
    small: Small, tmp_path: Path
) -> None:
    class Late(callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []

    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        small.fit(tmp_path, lambda: [Late()], epochs=1)
        assert received == [signal.SIGTERM]
        # The run saves and exits for it: then it is not sent again.
        with pytest.raises(SystemExit):
            small.fit(tmp_path / "run", list, Kill(8, signal.SIGTERM))
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


class Stops(callbacks.Callback):
    """Stops within an epoch, once, and is not asked again."""

    def __init__(self, seen: int = 0, number: int | None = None) -> None:
        super().__init__()
        self.seen, self._number = seen, number  # A count, though it is named like an argument.

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen == 8:
            self.model.stop_training = True
            if self._number is not None:
                os.kill(os.getpid(), self._number)


def test_a_stop_is_not_forgotten_if_a_signal_comes_with_it(small: Small, tmp_path: Path) -> None:
    truth = small.fit(tmp_path / "whole", lambda: [Stops()], saves=8)
    assert truth[1][0] == [0, 1]
    with pytest.raises(SystemExit):
        small.fit(tmp_path / "run", lambda: [Stops(number=signal.SIGTERM)], saves=8)
    assert names(tmp_path / "run") == [8]
    resumed = small.fit(tmp_path / "run", lambda: [Stops()], saves=8)
    assert_same_bits(resumed[0], truth[0])
    assert resumed[1:] == truth[1:]


def test_other_data_is_refused(small: Small, tmp_path: Path, subtests: pytest.Subtests) -> None:
    data, model = shuffled(), small.model
    run = tmg.Checkpoints(tmp_path / "own", model, model.optimizer, data)
    with pytest.raises(tmg.CheckpointError, match=r"a new pass over checkpoints\.data"):
        tmg.fit(model, data, callbacks=[run.callback()], verbose=0)
    endless = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()
    run = tmg.Checkpoints(tmp_path / "endless", model, model.optimizer, endless)
    with pytest.raises(tmg.errors.DataError, match=r"steps_per_epoch=3 and.*data=lambda epoch: da"):
        tmg.fit(model, run.data, steps_per_epoch=3, callbacks=[run.callback()], verbose=0)
    # Other arrays, another batch size: refused before anything is trained.
    small.fit(tmp_path / "arrays", epochs=2)
    for arrays, size, text in (
        ((X[:20], Y[:20]), 4, "rows=20, in the checkpoint 22"),
        ((X, Y), 8, "batch_size=8, in the checkpoint 4"),
        ((X + 1, Y), 4, "digest="),
    ):
        with subtests.test(text):
            run = tmg.Checkpoints(tmp_path / "arrays", model, model.optimizer)
            run.restore()
            before, used = values(model), [run.callback()]
            with pytest.raises(tmg.CheckpointError, match=text):
                tmg.fit(model, arrays, batch_size=size, epochs=4, callbacks=used, verbose=0)
            assert_same_bits(values(model), before)


# What callbacks remember --------------------------------------------------------------------------


def test_callbacks_of_keras_are_those_of_a_run_that_was_not_interrupted(
    small: Small, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> list[Any]:
        return [
            callbacks.EarlyStopping("loss", patience=3, min_delta=0.1, restore_best_weights=True),
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.1),
        ]

    # In the middle of an epoch, and after its last batch: it is ended first.
    small.check(tmp_path / "middle", make, 17, epochs=30)
    small.check(tmp_path / "last", make, 19, saves=6, epochs=30)
    # Ended by a callback: it stays ended, with more epochs too, and ends with the best weights.
    trained, logs, _ = small.fit(tmp_path / "run", make, epochs=30, saves=None)
    assert len(logs[0]) < 30
    again = small.fit(tmp_path / "run", make, epochs=60, saves=None)
    assert again[1] == logs
    assert_same_bits(again[0], trained)
    assert "A callback ended this run" in caplog.text


class Begins(callbacks.Callback):
    """Loads weights when training begins; resets moments, and shrinks, when an epoch does."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.model.set_weights([0 * weight + 0.1 for weight in self.model.get_weights()])
        self.model.optimizer.learning_rate = 0.03

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights([0.9 * weight for weight in self.model.get_weights()])
        for variable in self.model.optimizer.variables[2:]:
            variable.assign(variable * 0)


def test_what_callbacks_do_when_they_begin_is_not_done_twice(small: Small, tmp_path: Path) -> None:
    def make() -> list[Any]:
        plateau = callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1, factor=0.1)
        return [Begins(), plateau]

    # In the middle of an epoch, and at an epoch's end, where the next one's beginning is new.
    small.check(tmp_path / "middle", make, 16)
    small.check(tmp_path / "end", make, 20, saves=None)


def test_a_metric_of_the_forward_is_in_the_logs_after_a_restart(tmp_path: Path) -> None:
    small = Small()
    small.model.compile(small.model.optimizer)
    small.model.mean = keras.metrics.Mean(name="mean")

    def forward(model: Any, batch: Any, training: bool) -> tmg.LossSum:
        values = tf.square(model(batch[0], training=training) - batch[1])
        model.mean.update_state(values)
        return tmg.LossSum(tf.reduce_sum(values), tf.size(values))

    small.check(tmp_path, list, 9, 18, forward=forward)


def test_epochs_are_those_of_fit(small: Small, tmp_path: Path) -> None:
    small.check(tmp_path / "middle", list, 9, 6, initial_epoch=2)
    small.check(tmp_path / "end", list, 14, saves=None, initial_epoch=2)
    # Its first epoch is known; what is said again may be another.
    again = small.fit(tmp_path / "end" / "14", list, initial_epoch=0, epochs=6)
    assert again[1][0] == [2, 3, 4, 5]


class Opaque(callbacks.Callback):
    def __init__(self, folder: Path = Path("unused")) -> None:
        super().__init__()
        self.inner = [callbacks.EarlyStopping("loss")]
        self.recent: deque[int] = deque(maxlen=2)
        self.teacher = network(2, keras.layers.Dense(1))
        self.late: Any = None
        self.folder = folder  # Does not change: no word about it, nor about a function.
        self.function, self.shape = print, (2, 3)

    def on_train_begin(self, logs: Any = None) -> None:
        self.watched = self.model.layers[-1]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.recent.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.late = object()


def test_what_cannot_be_saved_is_named(small: Small, tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [Opaque(), callbacks.LearningRateScheduler(lambda epoch, rate: rate)]

    with pytest.warns(UserWarning, match="these attributes of callbacks") as told:
        small.fit(tmp_path, make, epochs=3, saves=1)
    unsaved = "Opaque.inner (EarlyStopping), Opaque.recent (deque), Opaque.teacher (Sequential)"
    texts = {str(each.message).partition("callbacks: ")[2].partition(". A ")[0] for each in told}
    assert texts - {""} == {unsaved, f"{unsaved}, Opaque.late (object)"}
    # Nothing of it stands in the way of a resumed run.
    with pytest.warns(UserWarning, match="these attributes of callbacks"):
        small.fit(tmp_path, make, epochs=4)
    assert small.restored == 18


def test_callbacks_are_matched_by_name_and_what_they_watch(
    small: Small, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = callbacks.EarlyStopping
    first = [stopping("val_loss", patience=9), stopping("loss", patience=9), Stops(seen=1)]
    with pytest.warns(UserWarning, match="Early stopping conditioned on metric"):
        small.fit(tmp_path, lambda: first, epochs=1, saves=6)
    # Another order, another patience, one more: none of it confuses which is which.
    second = [callbacks.TerminateOnNaN(), stopping("loss", patience=5)]
    small.fit(tmp_path, lambda: second, epochs=3, saves=6)
    assert second[1].patience == 5
    assert second[1].best <= first[1].best
    assert second[1].best_epoch >= first[1].best_epoch
    assert "without the restart: EarlyStopping val_loss #0, Stops #0\n" in caplog.text
    third = Stops(number=None)
    small.fit(tmp_path, lambda: [third], epochs=4, saves=6)
    assert third.seen == 6  # Those of the checkpoint were forgotten when it was left out.


def test_a_state_that_cannot_be_saved_is_an_error(small: Small, tmp_path: Path) -> None:
    class Returns(callbacks.Callback):
        def state(self) -> Any:
            return {"thing": object()}

        def set_state(self, state: Any) -> None:
            pass

    with pytest.raises(tmg.CheckpointError, match=r"of callbacks: Returns\.state\(\) \(object\)\."):
        small.fit(tmp_path, lambda: [Returns()])


class Remembers(callbacks.Callback):
    """Every kind of plain value; only some of them change."""

    def __init__(self, limit: int, best: float = np.inf, seen: Any = (), table: Any = None) -> None:
        super().__init__()
        self._limit, self.best, self.seen = limit, best, list(seen)
        self.table = np.zeros(2000) if table is None else table  # Its text leaves numbers out.
        self.short = np.zeros(2, tf.bfloat16.as_numpy_dtype)
        self.pair = ({1: np.float32(0.5), "a": None}, np.zeros(2), True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        counts, total, flag = self.pair
        counts[1] += np.float32(logs["loss"])
        total += logs["loss"]
        self.best = min(self.best, logs["loss"])
        self.table[1000] += self.best
        self.short += 1
        now = self.table[1000], self.short.tolist(), epoch, counts[1], total.tolist(), flag
        self.seen.append((*now, self.best))


def test_plain_values_come_back_as_they_were(small: Small, tmp_path: Path) -> None:
    small.check(tmp_path, lambda: [Remembers(3)], 16, 20)
    again = Remembers(4)
    small.fit(tmp_path / "16", lambda: [again])
    assert again._limit == 4  # Of this process: it did not change.


# Fails if a run goes on with another cut, so that its bits end otherwise, and nobody is told.
@pytest.mark.parametrize(("now", "told"), [(2, False), (1, True), (None, True)])
def test_another_number_of_logical_replicas_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, now: int | None, told: bool
) -> None:
    small = Small()
    with pytest.raises(Killed):
        small.fit(tmp_path, list, Kill(5), logical_replicas=2, verify=False)
    caplog.clear()
    small.fit(tmp_path, logical_replicas=now, verify=False, epochs=1)
    assert ("write logical_replicas=2, in tmg.fit" in caplog.text) == told
    small.fit(tmp_path, logical_replicas=2, verify=False)
