"""Ctrl-C and SIGTERM end fit, ``step.run`` and predict on whole steps, and SIGTERM saves them."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from law.model import Batch, Training, regression, small
from law.pair import assert_replicas_agree, known, strategy_of
from law.plain import PlainLoop, assert_values, specs_of
from law.processes import pool

import tfmultigpu as tmg

BATCHES = regression([7, 1, 2, 5])
MANY = 3000  # Steps that take some ten seconds; none of the tests gets there.


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell starts processes in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(number: int, frame: Any) -> None:
    """Ctrl-C; sent again if it came in a ``__del__``, whose errors Python ignores."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            threading.Timer(0.01, os.kill, [os.getpid(), number]).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def build() -> Training:
    keras.utils.set_random_seed(3)
    training = small(keras.optimizers.SGD(0.05, momentum=0.9))
    training.model.compile(training.optimizer, training.loss)
    return training


def endless(at: int, parts: int = 2) -> tf.data.Dataset:
    """Batches without end; reading number ``at`` is Ctrl-C."""

    def read() -> Iterator[Batch]:
        for number, batch in enumerate(itertools.cycle(BATCHES)):
            if number == at:
                os.kill(os.getpid(), signal.SIGINT)
            if number >= at:
                time.sleep(0.003)
            yield batch[:parts]

    signature = specs_of(BATCHES[0][:parts])
    return tf.data.Dataset.from_generator(read, output_signature=signature).repeat()


def assert_whole_steps(ours: Training) -> int:
    """Holds that weights and slots are those of as many steps as the optimizer has counted."""
    steps = int(ours.optimizer.iterations.numpy())
    truth = build()
    PlainLoop(truth, BATCHES[0]).train(itertools.islice(itertools.cycle(BATCHES), steps))
    assert_values(ours.values(), truth.values(), truth.variables())
    assert_replicas_agree(strategy_of(3), ours.model.variables)
    return steps


class Interrupts(keras.callbacks.Callback):
    """Sends a signal at the end of a batch, counted over all epochs."""

    def __init__(self, number: int, batch: int) -> None:
        super().__init__()
        self._number, self._left = number, batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), self._number)


def replicated() -> Training:
    with strategy_of(3).scope():
        return build()


# Fails if a step is counted that did not run, or half of one ran; or if nothing can train after it.
def test_ctrl_c_ends_fit_after_a_whole_step() -> None:
    ours = replicated()
    with pytest.raises(KeyboardInterrupt):
        tmg.fit(
            ours.model,
            known(BATCHES),
            epochs=5,
            callbacks=[Interrupts(signal.SIGINT, 6)],
            verbose=0,
        )
    assert assert_whole_steps(ours) == 6
    # Two batches of the second epoch are left out: the next fit begins a pass, as Keras' does.
    tmg.fit(ours.model, known(BATCHES).skip(2), verbose=0)
    tmg.fit(ours.model, known(BATCHES), verbose=0)
    assert assert_whole_steps(ours) == 12


# Fails if all steps of the call run first, or the rest of them is lost together with their count.
def test_ctrl_c_ends_a_call_of_many_steps_after_a_whole_one() -> None:
    ours, strategy = replicated(), strategy_of(3)
    step = tmg.make_train_step(ours.model, ours.optimizer, ours.loss, strategy)
    iterator = iter(tmg.distribute_dataset(endless(at=20), strategy))
    with pytest.raises(KeyboardInterrupt):
        step.run(iterator, MANY)
    steps = assert_whole_steps(ours)
    assert 0 < steps < MANY
    again = tmg.distribute_dataset(known(BATCHES), strategy)
    for shards in list(again)[steps % len(BATCHES) :]:
        step(shards)
    assert assert_whole_steps(ours) % len(BATCHES) == 0


# Fails if prediction goes on to the end of its data, or the next one begins in its middle.
def test_ctrl_c_ends_predictions() -> None:
    ours = replicated()
    with pytest.raises(KeyboardInterrupt):
        tmg.predict(ours.model, endless(at=20, parts=1).take(MANY))
    predicted = tmg.predict(ours.model, known(BATCHES))
    expected = build().model(np.concatenate([x for x, _ in BATCHES])).numpy()
    np.testing.assert_allclose(predicted, expected, rtol=1e-7)


def fit_until_sigterm(directory: Path, batch: int) -> None:
    """For a process of its own: a fit that saves only at the ends of epochs."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    ours = replicated()
    checkpoints = tmg.Checkpoints(directory, model=ours.model, optimizer=ours.optimizer)
    callbacks = [Interrupts(signal.SIGTERM, batch), checkpoints.callback()]
    tmg.fit(ours.model, known(BATCHES), epochs=100, callbacks=callbacks, verbose=0)


# Fails if the steps since the last checkpoint are lost, or if the process ends otherwise.
def test_sigterm_saves_the_steps_of_fit_and_exits(tmp_path: Path) -> None:
    worker = pool().start()
    worker.begin(fit_until_sigterm, tmp_path / "run", 6)
    assert worker.wait() == 128 + signal.SIGTERM
    ours = replicated()
    with strategy_of(3).scope():
        ours.optimizer.build(ours.model.trainable_variables)
    checkpoints = tmg.Checkpoints(tmp_path / "run", model=ours.model, optimizer=ours.optimizer)
    restored = checkpoints.restore()
    assert restored is not None
    assert restored >= 6
    assert assert_whole_steps(ours) == restored < 100
