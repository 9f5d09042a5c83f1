"""Ends that end: a dead program leaves, and nobody waits for ever for a worker that is gone.

A worker that raised an error says so to the others at once and leaves, whatever threads of
TensorFlow still wait for. A worker that hears of an end while it is inside a call that needs the
others has that call ended: first by TensorFlow, which raises, and else by the end of the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import tensorflow as tf

from tfmultigpu._compat import abort_collectives
from tfmultigpu.clusters.connection import WorkerLink

__all__ = ["Calls", "Watchdog", "end_within", "leave_on_errors", "let_go_of_the_last_error"]

# TensorFlow itself ends a collective some ten seconds after another worker was lost.
_ABORT_SECONDS = 20.0
_END_SECONDS = 60.0
# Other threads and what is registered with atexit may still save something.
_ERROR_SECONDS = 60.0


class Calls:
    """The calls that need all workers and that threads of this process are inside of."""

    def __init__(self) -> None:
        """Begins with none."""
        self._numbers = itertools.count()
        self._open: dict[int, tuple[int, float]] = {}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Notes such a call. One inside of another is progress of the other."""
        thread = threading.get_ident()
        outer = self._open.get(thread)
        self._open[thread] = next(self._numbers), time.monotonic()
        try:
            yield
        finally:
            if outer is None:
                self._open.pop(thread, None)
            else:
                self._open[thread] = next(self._numbers), time.monotonic()

    def waiting(self, since: float) -> dict[int, float]:
        """Returns the seconds that each call has waited after a moment, by its number."""
        now = time.monotonic()
        return {number: now - max(began, since) for number, began in list(self._open.values())}


class Watchdog:
    """Ends calls that wait for a worker that has ended."""

    def __init__(self, link: WorkerLink, calls: Calls, explain: Callable[[], str]) -> None:
        """Takes what it watches.

        Args:
            link: Knows who has ended.
            calls: The calls of this process.
            explain: Returns what the process says as its last words.
        """
        self._link, self._calls, self._explain = link, calls, explain

    def start(self) -> None:
        """Watches in a thread, for as long as the process runs."""
        threading.Thread(target=self._watch, name="tfmultigpu-watchdog", daemon=True).start()

    def _watch(self) -> None:
        while not self._link.wait_for_end(None):
            pass
        heard = time.monotonic()
        aborted = False
        while True:
            longest = max(self._calls.waiting(heard).values(), default=0.0)
            if longest >= _END_SECONDS:
                _end_now(self._explain())
            if longest >= _ABORT_SECONDS and not aborted:
                # What waits in a collective raises now, and the program ends by its own ways.
                aborted = True
                with contextlib.suppress(tf.errors.OpError):  # They may have been ended before.
                    abort_collectives("A worker has ended, and this one waits for it.")
            time.sleep(min(_ABORT_SECONDS, _END_SECONDS) / 20)


def leave_on_errors(
    say: Callable[[], None], explain: Callable[[BaseException], str | None]
) -> None:
    """Has an error that ends the program end the process too, after it was printed.

    Args:
        say: Tells the other workers; called at once, when ``sys.last_value`` is the error.
        explain: Returns what the error means, to be printed after it; None if it says so itself.
    """
    before, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            # A child made by fork has the hook as well, and an interactive session goes on.
            if os.getpid() == process and not _goes_on():
                end_within(_ERROR_SECONDS)
                say()
                words = explain(error)
                if words is not None:
                    _print(words)

    sys.excepthook = hook


def end_within(seconds: float) -> None:
    """Has the process end with code 1 if it is still here then.

    No thread of Python runs to the end of a process, and TensorFlow may hold Python's lock. Only
    this watchdog of Python's needs neither; what it prints goes nowhere.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere())


def let_go_of_the_last_error() -> None:
    """Forgets the variables of the functions that the last error has left.

    An iterator over slow data that is among them would be deleted after Python's threads have
    ended, and wait for one of them for ever.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
    gc.collect()


def _goes_on() -> bool:
    """Whether somebody types the next line."""
    return bool(sys.flags.interactive or os.environ.get("PYTHONINSPECT")) or hasattr(sys, "ps1")


def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _print(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # It may be closed.
        print(words, file=sys.stderr, flush=True)


def _end_now(words: str) -> None:
    end_within(1.0)  # Nobody may read what is printed.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _print(words)
    threading.Event().wait()
