"""The output of workers, passed on with their number in front, even if the reader has stopped."""

from __future__ import annotations

import collections
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["WorkerOutput", "cause"]

_TAIL_LINES = 200
_CAUSE_LINES = 5
_TRACEBACK = "Traceback (most recent call last):"
_WAIT = 0.1
# Seconds without a reader after which the rest is dropped, once all must end.
_PATIENCE = 1.0


class WorkerOutput:
    """Writes the lines of workers to standard output, and keeps the last of each.

    Workers wait in ``print`` for the reader of this process, as they would without it. Once they
    were told to end, they no longer wait.
    """

    def __init__(self, workers: int) -> None:
        """Takes the number of workers."""
        self._width = len(str(workers - 1))
        self._workers = workers
        self._lock = threading.Lock()
        self._last: list[collections.deque[bytes]] = []
        self._hurries = False
        self._reason: str | None = None
        self.forget()

    @property
    def lost(self) -> str | None:
        """The reason why nothing more can be passed on; None as long as it can."""
        return self._reason

    def last(self, worker: int) -> list[str]:
        """Returns the last lines of a worker."""
        return [line.decode(errors="replace").rstrip("\n") for line in self._last[worker]]

    def forget(self) -> None:
        """Forgets the last lines."""
        self._last = [collections.deque(maxlen=_TAIL_LINES) for _ in range(self._workers)]

    def hurry(self) -> None:
        """Drops output that nobody reads, from now on."""
        self._hurries = True

    def pass_on(self, worker: int, line: bytes) -> None:
        """Passes on a line, or a piece of a long one."""
        self._last[worker].append(line)
        whole = f"[{worker:{self._width}}] ".encode() + line
        if not line.endswith(b"\n"):
            whole += b"\n"
        # If nobody reads this process, it still reads the workers: they would hang in `print`.
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
            self._hurries = True  # Nobody reads standard error either.
        finally:
            if free:
                self._lock.release()

    def _write(self, stream: Any, whole: bytes, patience: float | None = None) -> None:
        number = _number_of(stream)
        if number is None:  # Replaced by an object of Python, as in a notebook.
            stream.write(whole.decode(errors="replace"))
            stream.flush()
            return
        stream.flush()
        poll = select.poll()
        poll.register(number, select.POLLOUT)
        last = time.monotonic()
        while whole:
            if poll.poll(1000 * _WAIT):
                # A pipe that is ready takes this much without blocking.
                whole = whole[os.write(number, whole[: select.PIPE_BUF]) :]
                last = time.monotonic()
                continue
            limit = _PATIENCE if self._hurries else patience
            if limit is not None and time.monotonic() - last > limit:
                raise TimeoutError(0, "nobody reads it")


def cause(lines: Sequence[str]) -> list[str]:
    """Returns the lines that say why a process failed: its error, or the end of its output.

    The traceback itself was passed on before, so it is left out.

    Args:
        lines: The last lines of the process.

    Example:
        >>> cause(["Traceback (most recent call last):", "  File ...", "ValueError: no", "bye"])
        ['ValueError: no', 'bye']
    """
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    if starts:
        after = range(starts[-1] + 1, len(lines))
        begin = next((i for i in after if not lines[i].startswith((" ", "\t"))), None)
        if begin is not None:
            return list(lines[begin : begin + _CAUSE_LINES])
    return list(lines[-_CAUSE_LINES:])


def _number_of(stream: Any) -> int | None:
    """Returns the file descriptor of a stream; None if it has none, as in a notebook."""
    try:
        return int(stream.buffer.fileno())
    except (OSError, ValueError, AttributeError):
        return None
