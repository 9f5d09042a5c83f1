"""Requests to stop, such as SIGTERM before a preemption: noted at once, obeyed after a step."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from tfmultigpu.strategies.worker_exchange import WorkerExchange

# Seconds between votes. A vote takes some milliseconds.
_INTERVAL = 1.0
_MOST_STEPS = 1000


class StopSignal:
    """Listens for a signal, and notes in ``received`` that it came.

    A second signal acts as it would without this object.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.received = False
        self._before: list[Any] = []  # The handler of before, while this listens.

    def listen(self) -> bool:
        """Begins to listen, and returns whether it does: Python lets only the main thread do so."""
        if not self._before:
            try:
                self._before = [signal.signal(self.number, self._note)]
            except ValueError:  # This is another thread.
                return False
        return True

    def stop_listening(self) -> None:
        """Restores the handler of before, and passes on a signal that nobody has obeyed."""
        if self._before:
            # None: the handler was not set by Python, which cannot restore it.
            signal.signal(self.number, self._before.pop() or signal.SIG_DFL)
            if self.received:
                self.obey()
                os.kill(os.getpid(), self.number)

    def obey(self) -> None:
        """Notes that somebody obeys the signal, which is not passed on then."""
        self.received = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            self.stop_listening()
        self.received = True


class StopVote:
    """Decides to stop at the same step on all workers, if any of them was asked to."""

    def __init__(self, exchange: WorkerExchange) -> None:
        self._exchange = exchange
        self._every = 1
        self._since = 0
        self._asked = time.monotonic()

    def __call__(self, wanted: bool, steps: int, now: bool = False) -> bool:
        """Returns whether to stop; all workers must call it after the same steps.

        Several workers vote about once a second, after a number of steps that all compute from the
        same times.
        """
        if self._exchange.workers == 1:
            return wanted
        self._since += steps
        if self._since < self._every and not now:
            return False
        elapsed = time.monotonic() - self._asked
        told = self._exchange("whether to stop", [int(wanted), int(1e6 * elapsed)])
        seconds = float(told[:, 1].mean()) / 1e6
        if self._since:
            often = self._since * _INTERVAL / max(seconds, 1e-6)
            # At most twice as many as before: the first steps are not like the others.
            self._every = max(1, min(int(often), 2 * self._every, _MOST_STEPS))
        self._since, self._asked = 0, time.monotonic()
        return bool(told[:, 0].any())
