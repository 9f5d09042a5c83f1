"""A worker is killed at any place of its program; what is left goes on, to the bits of one device.

tests/workers/test_launch_elastic.py kills in the middle of an epoch, all but one, and again; what
an earlier run leaves behind is here.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import elastic
import pytest
from law import worker_functions
from law.processes import (
    Worker,
    WorkerRaised,
    call_all,
    pool,
    tf_config,
    unused_addresses,
)

pytestmark = pytest.mark.slow
WITHIN = 60.0  # Seconds in which DESIGN promises that the others end.


@pytest.fixture(scope="module")
def alone() -> Iterator[Worker]:
    """A process of one device."""
    worker = pool().start()
    yield worker
    worker.end()


@pytest.fixture(scope="module")
def whole(alone: Worker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    return str(alone.call(elastic.train_alone, str(folder))[1])


@pytest.fixture(scope="module")
def left(alone: Worker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was left in the middle of its first epoch."""
    folder = tmp_path_factory.mktemp("left")
    assert alone.call(elastic.train_alone, str(folder), 4) == (4, "")
    return folder


# What is killed, where, and the step from which one device goes on. An epoch has six steps.
PLACES = {"save": (0, 4), "restore": (1, 4), "check": (1, 4), "validation": (0, 6)}


# Fails if the other worker hangs, if a checkpoint is half written, or if what is left of the run
# ends with other bits.
@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_is_killed(
    place: str, alone: Worker, whole: str, left: Path, tmp_path: Path
) -> None:
    victim, step = PLACES[place]
    folder = shutil.copytree(left, tmp_path / "run")
    workers = pool().cluster(2)
    for worker in workers:
        worker.begin(elastic.train_and_die, str(folder), victim, place)
    assert workers[victim].wait() == -signal.SIGKILL, workers[victim].printed()
    survivor = workers[1 - victim]
    with pytest.raises(WorkerRaised) as raised:
        survivor.result(WITHIN)
    assert raised.value.kinds[0] == "WorkerLostError", raised.value
    assert f"First to go: worker {victim} of 2 at 127.0.0.1:" in raised.value.text
    survivor.send_signal(signal.SIGKILL)
    assert (folder / ".half-written.npz").exists() == (place == "save")
    assert alone.call(elastic.train_alone, str(folder)) == (step, whole)


# Fails if workers that start too early join a process of the run before, or wait for it for long.
@pytest.mark.parametrize("left_over", [(0, 1), (0,), (1,)], ids=str)
def test_ports_of_the_run_before_are_taken(left_over: tuple[int, ...]) -> None:
    addresses = unused_addresses(2)

    def start() -> list[Worker]:
        return [pool().start(TF_CONFIG=tf_config(addresses, index)) for index in range(2)]

    before = start()
    assert call_all(before, worker_functions.join) == [2, 2]
    for index, worker in enumerate(before):
        if index not in left_over:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
    told = []
    for worker in (again := start()):
        worker.begin(worker_functions.join, 5.0)
    for worker in again:
        with pytest.raises(WorkerRaised) as raised:
            worker.result(WITHIN)
        assert raised.value.kinds[0] == "ClusterError", raised.value
        told.append(raised.value.text)
    for index in left_over:
        assert "is taken" in told[index], told[index]
    for worker in (*before, *again):
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    fresh = start()
    assert call_all(fresh, worker_functions.join) == [2, 2]
    for worker in fresh:
        worker.send_signal(signal.SIGKILL)
