"""Where SIGTERM is not heard, in another thread than the main one, the training says so."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from law.model import regression, small
from law.pair import known
from law.processes import pool

import tfmultigpu as tmg

BATCHES = regression([7, 1, 2, 5])
EPOCHS = 3


def one_device() -> Any:
    return tmg.create_strategy(prefer="one_device")  # Other tests of this process have others.


def compiled(strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        training = small()
        training.model.compile(training.optimizer, training.loss)
    return training.model


def in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function, name="of a pool")
    thread.start()
    thread.join()


def fit(directory: Path, batch: int = 0, line: str = "checkpoints.callback()") -> Any:
    """Trains to the end, or to a SIGTERM after a batch, from the last checkpoint on."""
    model = compiled(one_device())
    checkpoints = tmg.Checkpoints(directory, model, model.optimizer, known(BATCHES))
    checkpoints.restore()
    left = [batch]

    def terminate(batch: int, logs: Any) -> None:
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGTERM)

    used = [
        keras.callbacks.LambdaCallback(on_train_batch_end=terminate),
        eval(line, {"checkpoints": checkpoints}),
    ]
    tmg.fit(model, checkpoints.data, epochs=EPOCHS, callbacks=used, verbose=0)
    return model


def said_by(training: Callable[[], Any]) -> str:
    """Returns what a training says of SIGTERM, in one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training()
    said = [str(one.message) for one in caught if "SIGTERM" in str(one.message)]
    assert len(said) <= 1
    return "".join(said)


# Fails if a training in a thread is silent about the SIGTERM that it will not hear, or one in the
# main thread is not.
def test_a_training_in_a_thread_says_that_it_will_not_hear_sigterm(tmp_path: Path) -> None:
    def loop() -> None:
        strategy = one_device()
        model = compiled(strategy)
        step = tmg.make_train_step(model, model.optimizer, model.loss, strategy)
        checkpoints = tmg.Checkpoints(tmp_path / "loop", train_step=step, data=known(BATCHES))
        for _ in checkpoints.epochs(1):
            said_before_a_step.append(int(model.optimizer.iterations.numpy()) == 0)
            for batch in checkpoints.data:
                step(batch)
                checkpoints.after_step()

    said_before_a_step: list[bool] = []
    for number, training in enumerate((lambda: fit(tmp_path / "fit"), loop)):
        told = said_by(lambda training=training: in_a_thread(training))
        assert "a training in thread 'of a pool'" in told, number
        assert "Train in the main thread" in told
    assert said_by(lambda: fit(tmp_path / "main")) == ""
    assert said_before_a_step == [True]


def fit_in_a_thread(directory: Path, line: str) -> None:
    in_a_thread(lambda: fit(directory, 7, line))


# Fails if the line of the warning loses more than the steps since it has saved, or if the main
# thread, which it names too, does not save all.
@pytest.mark.parametrize("thread", ["main", "another"])
def test_what_the_warning_tells_to_write_keeps_the_steps(tmp_path: Path, thread: str) -> None:
    directory = tmp_path / "run"
    worker = pool().start()
    if thread == "main":
        worker.begin(fit, directory, 7)
        assert worker.wait() == 128 + signal.SIGTERM
    else:
        told = said_by(lambda: in_a_thread(lambda: fit(tmp_path / "other")))
        line = re.search(r"checkpoints\.callback\(every_steps=\d+\)", told)
        assert line is not None
        worker.begin(fit_in_a_thread, directory, re.sub(r"\d+", "2", line[0]))
        assert worker.wait() == -signal.SIGTERM

    model = compiled(one_device())
    restored = tmg.Checkpoints(directory, model, model.optimizer, known(BATCHES)).restore()
    assert restored == (7 if thread == "main" else 6)
    for weight, truth in zip(
        fit(directory).get_weights(), fit(tmp_path / "whole").get_weights(), strict=True
    ):
        np.testing.assert_array_equal(weight, truth)
