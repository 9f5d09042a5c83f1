"""Real workers: whatever ends one of them, the other ends soon and names it."""

from __future__ import annotations

import signal
import time

import pytest
import worker_faults
from law.processes import SECONDS, Worker, pool

LOST = "tfmultigpu.errors.WorkerLostError: Another worker is gone"
# What happens to worker 1, its exit code, and what is said of it.
FAULTS = {
    "kill": (signal.SIGKILL, -9, "its connection broke off"),
    "terminate": (signal.SIGTERM, -15, "its connection broke off"),
    "interrupt": (signal.SIGINT, 1, "it ended with KeyboardInterrupt"),
    "freeze": (signal.SIGSTOP, 1, "it does not answer"),
    "raise": (None, 1, "it ended with ValueError: my own"),
    "exit": (None, 0, "its program ended without an error"),
}


def started(event: str, word: str, end_seconds: float = 45.0) -> list[Worker]:
    """Starts two workers; returns them when each of them trains, or the first says the word."""
    workers = pool().cluster(2)
    for worker in workers:
        worker.begin(worker_faults.train, event, end_seconds)
    end = time.monotonic() + SECONDS
    while not (word in workers[0].printed() and "READY" in workers[1].printed()):
        assert time.monotonic() < end, [worker.printed() for worker in workers]
        time.sleep(0.05)
    return workers


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_worker_ends_and_names_it(fault: str) -> None:
    number, code, said = FAULTS[fault]
    survivor, victim = started(fault, "READY")
    if number is not None:
        victim.send_signal(number)
    assert survivor.wait(60.0) == 1
    printed = survivor.printed()
    assert LOST in printed
    assert "First to go: worker 1 of 2 at 127.0.0.1:" in printed
    assert said in printed, printed
    victim.send_signal(signal.SIGCONT)
    assert victim.wait(60.0) == code, victim.printed()


@pytest.mark.slow
def test_slow_data_keeps_no_process_for_ever() -> None:
    survivor, victim = started("slow", "SLOW", end_seconds=4.0)
    victim.send_signal(signal.SIGKILL)
    assert survivor.wait(60.0) == 1
    assert LOST in survivor.printed()


@pytest.mark.slow
def test_a_chief_that_saves_is_left_alone() -> None:
    chief, other = started("finish", "READY", end_seconds=2.0)
    assert other.wait(60.0) == 0
    assert chief.wait(60.0) == 0
    assert "SAVED" in chief.printed()


@pytest.mark.slow
def test_ctrl_c_while_tensorflow_joins_ends_the_process() -> None:
    waiting, stopped = pool().cluster(2)
    for worker in (waiting, stopped):
        worker.begin(worker_faults.join)
    end = time.monotonic() + SECONDS
    while not ("JOINING" in waiting.printed() and "JOINING" in stopped.printed()):
        assert time.monotonic() < end, [waiting.printed(), stopped.printed()]
        time.sleep(0.05)
    time.sleep(1.0)  # TensorFlow holds Python's lock now.
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(10.0) == -signal.SIGINT
    stopped.send_signal(signal.SIGKILL)
