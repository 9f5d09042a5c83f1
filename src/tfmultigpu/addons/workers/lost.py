"""Lost workers: which one, how it ended, and an end of this process within a minute.

TensorFlow ends calls that wait for a lost worker with one of several errors, and may name the wrong
worker. Here it becomes one error with the right one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.addons.workers.ends import FINISHED, End, Ends, note_lost
from tfmultigpu.clusters import Cluster
from tfmultigpu.errors import TfMultiGpuError, WorkerLostError
from tfmultigpu.strategies.worker_exchange import different_calls

# TensorFlow has no error class for a lost worker, so its texts decide: those of 2.19 to 2.21.
_ABORTED = "tfmultigpu: a worker was lost"
_GONE = re.compile(
    r"stopped sending heartbeats|CoordinationService/Heartbeat|Connection reset by peer|"
    r"Socket closed|failed to connect to all addresses|Connection refused|recvmsg:|"
    rf"coordination service.*(disconnect|unavailable|shut)|{_ABORTED}",
    re.IGNORECASE,
)
# Its words if workers brought different tensors to one collective.
_DIFFERENT = re.compile(
    r"(Collective instance \S+ expected |Shape mismatch in the collective instance )[^\n\"\\]*"
)
_REPORTED = re.compile(r"Error reported from /job:worker/(?:replica:\d+/)?task:(\d+)")
_TASK = re.compile(r"/job:worker/replica:\d+/task:(\d+)")
_NEWS_SECONDS = 2.0  # TensorFlow may hear of an end some milliseconds earlier.
_FIRST_SECONDS = 1.0  # In which the worker that failed ends before the others do.
_ABORT_SECONDS = 20.0
_EXIT_SECONDS = 8.0
_LONGEST = 300
_SILENT = End("it does not answer: it is frozen, or its machine failed")


class JoinedWorkers:
    """The cluster that this process has joined, and what becomes of its workers.

    Attributes:
        end_seconds: The seconds that this process may run once another one has failed.
    """

    def __init__(self, cluster: Cluster, ends: Ends) -> None:
        """Begins to watch the others, and to tell them how this process ends."""
        self.workers, self.index = tuple(cluster.workers), cluster.index or 0
        self._cluster, self._ends = cluster, ends
        self._calls: dict[int, float] = {}  # The time at which each thread began to wait.
        self._told = False
        self.end_seconds = 45.0
        if len(self.workers) > 1:
            self._before, sys.excepthook = sys.excepthook, self._end_by_error
            atexit.register(self._end)
            threading.Thread(target=self._watch, daemon=True).start()

    def __str__(self) -> str:
        """Returns which of the workers this process is."""
        return str(self._cluster)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns TensorFlow's error for a lost worker, or for different calls, into ours."""
        thread = threading.get_ident()
        outer = self._calls.get(thread)
        self._calls[thread] = time.monotonic()
        try:
            yield
        except Exception as error:
            explained = self._explain(error)
            if explained is None:
                raise
            self._told = True
            raise explained from error
        finally:
            if outer is None:
                self._calls.pop(thread)
            else:  # The end of a call inside is progress of the outer one.
                self._calls[thread] = time.monotonic()

    def compare(self, name: str, value: str, seconds: float) -> str | None:
        """Returns the first worker's value of that name; None if it did not tell it in time."""
        # Only the first worker sets values: while it is frozen, that would stop any other process.
        if self.index > 0:
            try:
                return _compat.cluster_value(name, seconds)
            except tf.errors.OpError:
                # The first worker is gone: the next step names it, and its data does not matter.
                return value
        _compat.set_cluster_value(name, value)
        return value

    def states(self, seconds: float) -> dict[int, Any]:
        """Returns what each other worker does, as its watch says; see ``recorder.describe``.

        ``{"ended": how}`` is in place of the state of one that has ended; None says that it is not
        watched. A worker that does not answer within so many seconds is left out.
        """
        answers: dict[int, Any] = self._ends.ask(len(self.workers), seconds)
        for worker, end in self._ends.wait(0.0).items():
            answers[worker] = {"ended": end.how}
        return answers

    def _explain(self, error: BaseException) -> TfMultiGpuError | None:
        if not isinstance(error, tf.errors.OpError):
            return None
        text = str(error)
        if (different := _DIFFERENT.search(text)) is not None:
            return different_calls(f"TensorFlow says: {different[0].strip()[:_LONGEST]}")
        named = _GONE.search(text) is not None
        # The error of a bad batch stays itself, whoever has ended since.
        waited = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
        waited |= isinstance(error, tf.errors.CancelledError | tf.errors.DeadlineExceededError)
        if not named and not (waited and self._ends.wait(0.0)):
            return None
        ended = self._ends.wait(_NEWS_SECONDS)
        # One that is frozen keeps its connections, and others may have ended because of it.
        causes = {i: end for i, end in ended.items() if not end.lost_another}
        lines = text.splitlines() or [type(error).__name__]
        said = lines[-1]
        for line in lines:
            if _GONE.search(line):
                said = line
                break
        return self._lost(causes or self._silent(text) or ended, said.strip())

    def _silent(self, text: str) -> dict[int, End]:
        """Returns who does not answer, as TensorFlow says."""
        tasks = _REPORTED.findall(text)
        if not tasks and "CoordinationService/" in text:
            tasks = ["0"]  # The first worker, which counts the heartbeats of the others.
        silent = sorted({int(task) for task in tasks or _TASK.findall(text)} - {self.index})
        return dict.fromkeys(silent, _SILENT)

    def _lost(self, ended: dict[int, End], said: str) -> WorkerLostError:
        note_lost(self.index)
        who = "; then ".join(f"{self._cluster.name(i)}: {end.how}" for i, end in ended.items())
        cure = (
            "Its log has the reason. Start all workers again; they resume from the last checkpoint "
            "that they restore. `python -m tfmultigpu launch --restarts 3` does so on one machine."
        )
        if ended and all(end == FINISHED for end in ended.values()):
            # The programs differ in what they call: they would do so again.
            cure = (
                "This worker made a call that the other did not, and starting again would end in "
                "the same way. Every worker must make this call: take it, such as "
                "tmg.evaluate(model, data), out of `if worker == 0:`, and let no worker leave the "
                "program or a loop before the others."
            )
        return WorkerLostError(
            "Another worker is gone, and the others cannot continue without it. First to go: "
            f"{who or 'TensorFlow does not say which'}.",
            "",
            f"{cure} TensorFlow says: {said[:_LONGEST]}",
        )

    def _watch(self) -> None:
        """Ends calls that wait for a worker that has ended, and at last the process."""
        self._ends.wait(None)
        heard = time.monotonic()
        aborted = False
        while True:
            time.sleep(_FIRST_SECONDS)
            waits = [time.monotonic() - max(began, heard) for began in list(self._calls.values())]
            waited = max(waits, default=0.0)
            ended = self._ends.wait(0.0)
            failed = any(end != FINISHED for end in ended.values())
            if not aborted and (failed or waited > _ABORT_SECONDS):
                aborted = True  # Collectives raise now, and the program ends in its usual way.
                _compat.abort_collectives(_ABORTED)
            # A worker that has finished may leave another one that still saves its files.
            stuck = failed and not self._told and time.monotonic() - heard > self.end_seconds
            if stuck or waited > self.end_seconds:
                error = self._lost(ended, "nothing; this process still waits, or makes its data.")
                _end_within(1.0)  # Nobody may read the output, and printing would wait.
                _print(error)
                threading.Event().wait()

    def _end_by_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Prints the error that ends the program; the others hear of it, and the process ends."""
        self._before(kind, error, trace)
        if sys.flags.interactive or hasattr(sys, "ps1"):
            return
        # Other threads, and what is registered with atexit, may still save something.
        _end_within(self.end_seconds)
        self._ends.leave(_end_by(error))
        if (explained := self._explain(error)) is not None:
            _print(explained)

    def _end(self) -> None:
        """Tells the others that the program ends; after a failure nothing may hold it for long."""
        error = getattr(sys, "last_value", None)  # What has ended the program, if anything.
        self._ends.leave(FINISHED if error is None else _end_by(error))
        others = self._ends.wait(0.0).values()
        if error is not None or any(end != FINISHED for end in others):
            _end_within(_EXIT_SECONDS)


def _end_by(error: BaseException) -> End:
    first = str(error).strip().split("\n", 1)[0][:_LONGEST]
    how = f"it ended with {type(error).__name__}"
    if first:
        how += f": {first}"
    return End(how, lost_another=isinstance(error, WorkerLostError))


def _end_within(seconds: float) -> None:
    """Ends the process with code 1 if it still runs then.

    The timer of ``faulthandler`` is the only one that works at the end of a process: Python stops
    its threads before, and TensorFlow may hold Python's lock. It replaces one that the user set.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def _print(error: TfMultiGpuError) -> None:
    with contextlib.suppress(OSError, ValueError):  # The output may be closed.
        sys.stdout.flush()
        kind = type(error)
        print(f"{kind.__module__}.{kind.__qualname__}: {error}", file=sys.stderr, flush=True)
