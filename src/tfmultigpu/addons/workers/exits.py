"""Ends of a process: a failed program leaves, and nobody waits for ever for a lost worker.

A worker that raised an error tells the others at once and leaves, whatever threads of TensorFlow
still wait for. A worker that hears of an end during a call that needs the others has that call
ended: first by TensorFlow, which raises, and later by the end of the process.
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

from tfmultigpu.addons.workers.connection import WorkerLink

__all__ = ["Calls", "Watchdog", "end_within", "leave_on_errors", "let_go_of_the_last_error"]

# TensorFlow itself ends a collective some ten seconds after another worker was lost.
_ABORT_SECONDS = 20.0
_END_SECONDS = 60.0
# Other threads and what is registered with atexit may still save something.
_ERROR_SECONDS = 60.0


class Calls:
    """The calls that need all workers, and that threads of this process are in."""

    def __init__(self) -> None:
        """Begins with no calls."""
        self._numbers = itertools.count()
        self._open: dict[int, tuple[int, float]] = {}

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Notes such a call. A call inside another one counts as progress of the outer call."""
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
        """Returns the seconds that each call has waited since a moment, by its number."""
        now = time.monotonic()
        return {number: now - max(began, since) for number, began in list(self._open.values())}


class Watchdog:
    """Ends calls that wait for a worker that has ended."""

    def __init__(self, link: WorkerLink, calls: Calls, explain: Callable[[], str]) -> None:
        """Takes the connections and the calls to watch.

        Args:
            link: The connections, which know who has ended.
            calls: The calls of this process.
            explain: Returns the last words of the process.
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
                # Collectives that wait raise now, and the program ends in its usual way.
                aborted = True
                _abort_collectives()
            time.sleep(min(_ABORT_SECONDS, _END_SECONDS) / 20)


def _abort_collectives() -> None:
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    from tfmultigpu._compat import abort_collectives

    with contextlib.suppress(tf.errors.OpError):  # They may have ended before.
        abort_collectives("A worker has ended, and this one waits for it.")


def leave_on_errors(
    say: Callable[[], None], explain: Callable[[BaseException], str | None]
) -> None:
    """Makes an error that ends the program end the process too, after it was printed.

    Args:
        say: Tells the other workers; called at once, when ``sys.last_value`` is the error.
        explain: Returns what the error means, to print after it; None if the error says so itself.
    """
    before, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            # A child made by fork has the hook as well, and an interactive session continues.
            if os.getpid() == process and not _is_interactive():
                end_within(_ERROR_SECONDS)
                say()
                words = explain(error)
                if words is not None:
                    _print(words)

    sys.excepthook = hook


def end_within(seconds: float) -> None:
    """Ends the process with code 1 if it still runs then.

    Call it only in a process that is about to end. The timer of ``faulthandler`` is the only one
    that works there: Python stops its threads before the end, and TensorFlow may hold Python's
    lock. A process has one such timer and cannot read it, so this replaces one that the user set.
    Its traceback is not shown.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere())


def let_go_of_the_last_error() -> None:
    """Clears the local variables of the functions that the last error has left.

    If an iterator over slow data is among them, Python would delete it after its threads have
    ended, and the iterator would wait for one of them for ever.
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


def _is_interactive() -> bool:
    """Returns whether somebody types the next line."""
    return bool(sys.flags.interactive or os.environ.get("PYTHONINSPECT")) or hasattr(sys, "ps1")


def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY)


def _print(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # It may be closed.
        print(words, file=sys.stderr, flush=True)


def _end_now(words: str) -> None:
    end_within(1.0)  # Nobody may read the output, and printing would wait.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    _print(words)
    threading.Event().wait()
