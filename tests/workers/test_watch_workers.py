"""Causes of a wait over two workers: which one the others wait for, and where it is."""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import this_worker
from law import worker_functions
from law.processes import Worker, call_all, pool, wait_until_printed
from problems import network
from watching.hangs import LIMIT, Said, hearing, when_heard

import tfmultigpu as tmg
from tfmultigpu.addons.watching.causes import in_words_of, read_reports
from tfmultigpu.addons.workers.ends import End, Ends
from tfmultigpu.recorder import recorder

pytestmark = pytest.mark.slow
BATCH = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
made: dict[str, Any] = {}


def prepare() -> int:
    """Joins, and makes a step that is traced; returns the number of replicas."""
    replicas = worker_functions.join()
    strategy = this_worker.strategy()
    with strategy.scope():
        model = network(2, keras.layers.Dense(1))
        optimizer, metric = keras.optimizers.SGD(0.01), keras.metrics.MeanSquaredError()
    step = tmg.make_train_step(model, optimizer, "mse", strategy, metrics=[metric], verify=False)
    made.update(step=step, metric=metric)
    for batch in data_of(lambda: None):
        step(batch)
    return replicas


def data_of(before_the_last: Callable[[], None]) -> Any:
    def batches() -> Iterator[Any]:
        yield from [BATCH] * 3
        before_the_last()
        yield BATCH

    return tmg.distribute_dataset(batches, this_worker.strategy())


def wait_for(file: Path, said: Said) -> None:
    """Hangs, at one line, until both workers have said what was expected."""
    end = time.monotonic() + LIMIT
    while not (file.exists() and said.heard.is_set()):
        assert time.monotonic() < end, (said.words, said.texts)
        time.sleep(0.01)


def hang(cause: str, words: str, folder: str) -> str:
    """Trains until one worker hangs; returns what worker 0, or 1 itself, says of it."""
    worker, said_file = this_worker.index(), Path(folder, "said")
    step, metric = made["step"], made["metric"]

    with hearing(words) as said, tmg.watch(1.0, folder):

        def hang_here() -> None:
            if worker == 1:
                wait_for(said_file, said)

        if worker == 0:
            when_heard(said, said_file.touch)
        if cause == "generator":
            for batch in data_of(hang_here):
                step(batch)
        elif cause == "a batch less":
            data = iter(data_of(lambda: None))
            for _ in range(3):
                step(next(data))
            hang_here()
            step(next(data))
        elif cause == "metric":
            for batch in data_of(lambda: None):
                step(batch)
            hang_here()
            metric.result()
        elif cause == "stop":
            for batch in data_of(lambda: None):
                step(batch)
            print("READY", flush=True)
            with suppress(tmg.WorkerLostError):  # The heartbeats of TensorFlow end after 10 s.
                while not said.heard.is_set():
                    step(batch)
                    time.sleep(0.01)
        if worker == 0:
            said.wait()
        return said.said() if said.heard.is_set() else ""


@pytest.fixture(scope="module")
def both() -> Iterator[list[Worker]]:
    workers = pool().cluster(2)
    assert call_all(workers, prepare) == [2, 2]
    yield workers
    for worker in workers:
        worker.end()


# What hangs on worker 1, or is called on worker 0 alone, and what worker 0 says of it.
CAUSES = {
    "generator": "Worker 1: the generator of the data has not yielded, at test_watch_workers.py",
    "a batch less": "Worker 1 had a batch less, or left its loop before the others.",
    "metric": "Worker 0: it waits in result() of a metric, which adds the values of all workers",
}


# Fails if the worker that the others wait for is not named, with its place, or the steps of both.
@pytest.mark.parametrize("cause", CAUSES)
def test_the_worker_at_fault_is_named(both: list[Worker], tmp_path: Path, cause: str) -> None:
    said, _ = call_all(both, hang, cause, CAUSES[cause], str(tmp_path), seconds=2 * LIMIT)
    assert "Worker 1 of 2 " in said
    if cause == "a batch less":
        last = re.search(r"; the last was step (\d+) of TrainStep, at test_watch_workers", said)
        assert last is not None, said
        assert f"Worker 0 of 2 is in step {int(last[1]) + 1} of TrainStep for" in said
    # The doctor says the same from the files of both workers, and of one.
    reports = read_reports([str(tmp_path)])
    assert {report["worker"] for report in reports} == {0, 1}
    for part in (reports, reports[:1]):
        assert CAUSES[cause].partition(", at")[0] in in_words_of(part)


# Fails if a worker that is stopped is not named. It is the last test here: it ends the workers.
def test_a_worker_that_is_stopped(both: list[Worker], tmp_path: Path) -> None:
    for worker in both:
        worker.begin(hang, "stop", "Worker 1 does not answer: it is stopped", str(tmp_path))
    wait_until_printed("READY", *both)
    both[1].send_signal(signal.SIGSTOP)
    try:
        assert "Worker 0 of 2 is in step" in both[0].result(LIMIT)
    finally:
        for worker in both:
            worker.send_signal(signal.SIGKILL)


# Fails if a question of one worker does not reach all others, or an answer is lost on its way.
def test_workers_ask_over_the_connections_of_the_meeting() -> None:
    first, second = multiprocessing.Pipe(), multiprocessing.Pipe()
    everyone = [
        Ends(0, {1: first[0], 2: second[0]}), Ends(1, {0: first[1]}), Ends(2, {0: second[1]})
    ]  # fmt: skip
    assert everyone[1].ask(3, LIMIT) == {0: None, 2: None}  # Nobody is watched.
    recorder.begin(lambda: {"phase": "call"})
    try:
        for worker, ends in enumerate(everyone):
            others = {other: {"phase": "call"} for other in range(3) if other != worker}
            assert ends.ask(3, LIMIT) == others
        everyone[1].leave(End("it ended"))
        assert everyone[0].wait(LIMIT).keys() == {1}
    finally:
        recorder.end()
