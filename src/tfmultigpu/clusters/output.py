"""What workers print, passed on with their number in front, also to somebody who reads no more."""

from __future__ import annotations

import collections
import os
import select
import sys
import threading
import time
from typing import Any

__all__ = ["WorkerOutput"]

_TAIL_LINES = 20
_WAIT = 0.1
# Once all have to end, for so long nobody need read before the rest is left out.
_PATIENCE = 1.0


class WorkerOutput:
    """Writes the lines of workers to standard output, and keeps the last of each.

    Workers wait in ``print`` for whoever reads this process, as they would without it. Once they
    were told to end, nobody waits any longer.
    """

    def __init__(self, workers: int) -> None:
        """Takes how many workers there are."""
        self._width = len(str(workers - 1))
        self._workers = workers
        self._lock = threading.Lock()
        self._last: list[collections.deque[bytes]] = []
        self._hurries = False
        self._reason: str | None = None
        self.forget()

    @property
    def lost(self) -> str | None:
        """Why nothing more can be passed on; None as long as it can."""
        return self._reason

    def last(self, worker: int) -> list[str]:
        """Returns the last lines of a worker."""
        return [line.decode(errors="replace").rstrip("\n") for line in self._last[worker]]

    def forget(self) -> None:
        """Forgets the last lines."""
        self._last = [collections.deque(maxlen=_TAIL_LINES) for _ in range(self._workers)]

    def hurry(self) -> None:
        """Has what nobody reads left out from now on."""
        self._hurries = True

    def pass_on(self, worker: int, line: bytes) -> None:
        """Writes a line, or a piece of a long one."""
        self._last[worker].append(line)
        whole = f"[{worker:{self._width}}] ".encode() + line
        if not line.endswith(b"\n"):
            whole += b"\n"
        # Workers are read on when nobody reads this process: they would wait in `print` for ever.
        with self._lock:
            if self._reason is None:
                try:
                    self._write(sys.stdout, whole)
                except OSError as error:
                    self._reason = error.strerror or str(error)

    def say(self, text: str) -> None:
        """Writes a line of the launcher to standard error."""
        free = self._lock.acquire(timeout=2 * _PATIENCE)
        try:
            self._write(sys.stderr, f"[launch] {text}\n".encode(), _PATIENCE)
        except OSError:
            self._hurries = True  # Nobody reads that either.
        finally:
            if free:
                self._lock.release()

    def _write(self, stream: Any, whole: bytes, patience: float | None = None) -> None:
        number = _number_of(stream)
        if number is None:  # Replaced by something of Python's own.
            stream.write(whole.decode(errors="replace"))
            stream.flush()
            return
        stream.flush()
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        last = time.monotonic()
        while whole:
            if poll.poll(1000 * _WAIT):
                # A pipe that is ready takes so much without making anybody wait.
                whole = whole[os.write(number, whole[: select.PIPE_BUF]) :]
                last = time.monotonic()
                continue
            limit = _PATIENCE if self._hurries else patience
            if limit is not None and time.monotonic() - last > limit:
                raise TimeoutError(0, "nobody reads it")


def _number_of(stream: Any) -> int | None:
    """The number of the file behind a stream; None if there is none, as in a notebook."""
    try:
        return int(stream.buffer.fileno())
    except (OSError, ValueError, AttributeError):
        return None
