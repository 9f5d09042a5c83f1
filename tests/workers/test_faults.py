"""Whatever ends one of two workers, the other one ends soon and names it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import this_worker
from law import worker_functions
from law.processes import Worker, call_all, pool, wait_until_printed
from problems import network

import tfmultigpu as tmg
from tfmultigpu import _compat
from tfmultigpu.strategies.gathering import gather_rows
from tfmultigpu.strategies.process_state import process_state

pytestmark = pytest.mark.slow
WITHIN = 60.0  # Seconds in which DESIGN promises that the others end.
X = np.arange(12, dtype="float32").reshape(6, 2)
Y = X[:, :1] / 12
# What happens to worker 1, its exit code, and what is said of it. tests/promises kill it.
FAULTS = {
    "terminate": (signal.SIGTERM, -signal.SIGTERM, "its connection broke off"),
    "freeze": (signal.SIGSTOP, 1, "it does not answer"),
    "raise": (None, 1, "it ended with ValueError: my own"),
    "exit": (None, 0, "its program ended without an error"),
}


def compiled() -> Any:
    with this_worker.strategy().scope():
        model = network(2, keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def train(event: str, end_seconds: float) -> None:
    """Trains until something ends a worker."""
    worker_functions.join()
    process_state.cluster.end_seconds = end_seconds
    worker, model = this_worker.index(), compiled()
    strategy = this_worker.strategy()
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy, verify=False)
    (batch,) = tmg.distribute_dataset((X, Y), strategy, batch_size=6)
    for number in itertools.count():
        step(batch)
        if number == 3:
            print("READY", flush=True)
        if number == 20 and event == "slow" and worker == 0:
            print("SLOW", flush=True)
            time.sleep(300.0)  # As Python that makes data does.
        if number == 20 and event == "finish":
            if worker == 0:
                time.sleep(5.0)  # As a chief that still writes files does.
                print("SAVED", flush=True)
            return
        if number == 20 and worker == 1 and event == "raise":
            raise ValueError("my own")
        if number == 20 and worker == 1 and event == "exit":
            sys.exit(0)
        time.sleep(0.02)


def started(event: str, word: str = "READY", end_seconds: float = 45.0) -> list[Worker]:
    """Starts two workers; returns them when both train, or the first says the word."""
    workers = pool().cluster(2)
    for worker in workers:
        worker.begin(this_worker.run_as_program, train, event, end_seconds)
    wait_until_printed("READY", workers[1])
    wait_until_printed(word, workers[0])
    return workers


def assert_names_the_second(worker: Worker, said: str) -> None:
    assert worker.wait(WITHIN) == 1
    printed = worker.printed()
    assert "tfmultigpu.errors.WorkerLostError: Another worker is gone" in printed
    assert "First to go: worker 1 of 2 at 127.0.0.1:" in printed
    assert said in printed, printed


@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_worker_ends_and_names_it(fault: str) -> None:
    number, code, said = FAULTS[fault]
    survivor, victim = started(fault)
    if number is not None:
        victim.send_signal(number)
    assert_names_the_second(survivor, said)
    victim.send_signal(signal.SIGCONT)
    assert victim.wait(WITHIN) == code, victim.printed()


def read_alone() -> None:
    """Reads the first batch on worker 1, while worker 0 does not."""
    worker_functions.join()
    data = iter(tmg.distribute_dataset((X, Y), this_worker.strategy(), batch_size=6))
    print("READY", flush=True)
    if this_worker.index() == 0:
        time.sleep(300.0)
    next(data)
    print("READ", flush=True)


def test_a_killed_first_worker_is_not_blamed_for_being_late() -> None:
    chief, other = pool().cluster(2)
    for worker in (chief, other):
        worker.begin(read_alone)
    wait_until_printed("READY", chief, other)
    chief.send_signal(signal.SIGKILL)
    wait_until_printed("READ\n", other)
    assert "did not begin to read" not in other.printed()
    other.end()
    other.wait(WITHIN)


def test_slow_data_keeps_no_process_for_ever() -> None:
    survivor, victim = started("slow", "SLOW", end_seconds=4.0)
    victim.send_signal(signal.SIGKILL)
    assert_names_the_second(survivor, "its connection broke off")


def test_a_chief_that_saves_is_left_alone() -> None:
    chief, other = started("finish", end_seconds=2.0)
    assert other.wait(WITHIN) == 0
    assert chief.wait(WITHIN) == 0
    assert "SAVED" in chief.printed()


def join_late() -> None:
    """Joins; worker 1 stops between the meeting and TensorFlow's part, so worker 0 waits there."""
    configure = _compat.configure_coordination

    def announce(*arguments: float) -> None:
        print("JOINING", flush=True)
        if tmg.workers.cluster_from_environment().index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        configure(*arguments)

    _compat.configure_coordination = announce
    tmg.create_strategy()


def test_ctrl_c_while_tensorflow_joins_ends_the_process() -> None:
    waiting, stopped = pool().cluster(2)
    for worker in (waiting, stopped):
        worker.begin(join_late)
    wait_until_printed("JOINING", waiting, stopped)
    time.sleep(1.0)  # TensorFlow holds Python's lock now.
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(WITHIN) == -signal.SIGINT
    stopped.send_signal(signal.SIGKILL)


# Each way to compute ------------------------------------------------------------------------------


def compute_after_a_kill(folder: str) -> dict[str, tuple[str, str]]:
    """Returns which error each way to compute is once worker 1 has been killed."""
    strategy, model = this_worker.strategy(), compiled()
    with strategy.scope():
        variables = [variable.value for variable in model.trainable_variables]
        accumulator = tmg.GradientAccumulator(variables)
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy)
    evaluate = tmg.make_eval_step(model, "mse", strategy)
    predict = tmg.make_predict_step(model, strategy)
    data = tmg.distribute_dataset((X, Y), strategy, batch_size=6)
    (batch,) = data
    checkpoints = tmg.Checkpoints(folder, train_step=step)

    @tf.function
    def window() -> Any:
        ones = [tf.ones_like(variable) for variable in variables]
        strategy.run(lambda: accumulator.add(ones, 1.0))
        return accumulator.reduce()[1]

    def by_hand() -> Any:
        with tmg.strategies.explaining_lost_workers():
            return window()

    def gather() -> Any:
        spread = strategy.experimental_distribute_values_from_function
        return gather_rows(strategy, spread(lambda _: tf.ones([1, 1])))

    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: step(batch),
        "step.run": lambda: step.run(iter(data), 1),
        "eval step": lambda: evaluate(batch),
        "predict step": lambda: predict(batch),
        "evaluate": lambda: tmg.evaluate(model, (X, Y), batch_size=6),
        "predict": lambda: tmg.predict(model, X, batch_size=6),
        "fit": lambda: tmg.fit(model, (X, Y), batch_size=6, verbose=0),
        "accumulator": by_hand,
        "gather": gather,
        "checkpoint": checkpoints.save,
    }
    step(batch)
    if this_worker.index() == 1:
        time.sleep(2.0)  # The other one has its result, too.
        os.kill(os.getpid(), signal.SIGKILL)
    errors = {}
    for name, call in calls.items():
        with pytest.raises(Exception) as error:  # noqa: PT011 - the test looks at it.
            call()
        errors[name] = error.type.__name__, str(error.value)
    return errors


def test_every_way_to_compute_names_a_killed_worker(tmp_path: Path) -> None:
    workers = pool().cluster(2)
    assert call_all(workers, worker_functions.join) == [2, 2]
    for worker in workers:
        worker.begin(compute_after_a_kill, str(tmp_path))
    for call, (kind, text) in workers[0].result().items():
        assert kind == "WorkerLostError", (call, text)
        assert "First to go: worker 1 of 2 at 127.0.0.1:" in text
        assert "its connection broke" in text
    workers[0].end()
    assert workers[1].wait(WITHIN) == -signal.SIGKILL
