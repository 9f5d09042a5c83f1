"""Signals to stop: noted, voted on by workers, and given back to who had them."""

from __future__ import annotations

import os
import signal
import threading
import types

import numpy as np
import pytest

from tfmultigpu.addons.checkpoints import stop_signals
from tfmultigpu.addons.checkpoints.stop_signals import StopSignal, StopVote


def test_a_second_signal_does_what_it_would_have_done() -> None:
    caught = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    try:
        listener = StopSignal(signal.SIGUSR1)
        listener.listen()
        listener.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (listener.received, caught) == (True, [])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert caught == [signal.SIGUSR1]
        thread = threading.Thread(target=StopSignal(signal.SIGUSR1).listen)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(caught) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_workers_ask_each_other_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoWorkers:
        """Of which the other one is asked to stop, some time."""

        workers = 2
        asked = 0
        other = 0

        def __call__(self, purpose: str, numbers: list[int]) -> np.ndarray:
            self.asked += 1
            return np.array([numbers, [self.other, numbers[1]]])

    now = [0.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    exchange = TwoWorkers()
    vote = StopVote(exchange)

    def steps(count: int, seconds: float) -> int:
        """Makes steps of so many seconds; returns after how many one vote was to stop."""
        for step in range(count):
            now[0] += seconds
            if vote(False, 1):
                return step
        return count

    assert steps(10_000, 0.01) == 10_000
    assert 95 <= exchange.asked <= 115  # 100 seconds, and a few at the start.
    exchange.other = 1
    assert steps(10_000, 0.01) <= 100
    exchange.other, exchange.asked = 0, 0
    steps(100, 5.0)
    steps(50, 5.0)
    assert exchange.asked >= 50  # Long steps: each of them, from the next time on.
    exchange.other = 1
    assert vote(False, 0, now=True)
    alone = StopVote(types.SimpleNamespace(workers=1))
    assert [alone(False, 1), alone(True, 1)] == [False, True]
