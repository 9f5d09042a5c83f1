"""Lost workers, and workers that make different calls: which one, how it ended, and what to do.

TensorFlow ends calls that wait for a lost worker within some ten seconds. It raises one of several
errors, and may name the wrong worker. This module turns them into one error with the right one.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tfmultigpu.addons.workers.connection import WorkerLink
from tfmultigpu.addons.workers.exits import (
    Calls,
    Watchdog,
    end_within,
    leave_on_errors,
    let_go_of_the_last_error,
)
from tfmultigpu.addons.workers.spec import Cluster
from tfmultigpu.errors import ClusterError, TfMultiGpuError, WorkerLostError
from tfmultigpu.strategies.process_state import process_state

__all__ = [
    "different_calls",
    "explaining_lost_workers",
    "link_of_workers",
    "naming_lost_workers",
    "watch",
]

# TensorFlow has no error class of its own for a lost worker, so its texts decide. These are the
# words of TensorFlow 2.16 to 2.21.
_GONE = re.compile(
    r"stopped sending heartbeats|CoordinationService/Heartbeat|Connection reset by peer|"
    r"Socket closed|failed to connect to all addresses|Connection refused|recvmsg:|"
    r"coordination service.*(disconnect|unavailable|shut)",
    re.IGNORECASE,
)
# Its words if workers brought different tensors to one collective.
_DIFFERENT = re.compile(
    r"(Collective instance \S+ expected |Shape mismatch in the collective instance )[^\n\"\\]*"
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_KINDS = (
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "DeadlineExceededError",
    "InternalError",
    "UnknownError",
)
# News of a worker's end comes within milliseconds, but TensorFlow may be faster.
_NEWS_SECONDS = 2.0
_LONGEST = 300
# At the end of a program that failed, or whose workers have failed.
_EXIT_SECONDS = 8.0
# A process does not know its exit code then: sys.exit leaves no trace that could be read.
_FINISHED = "its program ended without an error, at its last line or by sys.exit"


def watch(cluster: Cluster, link: WorkerLink | None) -> None:
    """Notes the workers of this process, tells them of its end, and ensures that it ends."""
    process_state.cluster = _Joined(cluster, link)
    _state.link = link
    if link is None:
        return
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process:  # Not a child made by fork.
            link.leave(_how_this_process_ends())

    def end() -> None:
        leave()
        if os.getpid() == process and (_how_this_process_ends() != _FINISHED or _lost()):
            end_within(_EXIT_SECONDS)
            let_go_of_the_last_error()

    atexit.register(end)
    leave_on_errors(leave, _meaning)
    Watchdog(link, _state.calls, _last_words).start()


def link_of_workers() -> WorkerLink | None:
    """Returns the connections to the other workers; None if ``create_strategy`` made none."""
    return _state.link


class _State:
    link: WorkerLink | None = None
    calls = Calls()


_state = _State()


class _Joined:
    """The joined cluster, as the core sees it."""

    def __init__(self, cluster: Cluster, link: WorkerLink | None) -> None:
        self.cluster, self.link = cluster, link
        self.workers, self.index = cluster.workers, cluster.index

    def __str__(self) -> str:
        return str(self.cluster)

    def explaining(self):
        return explaining_lost_workers()

    def compare(self, name: str, value: str, seconds: float) -> str | None:
        link = self.link
        answers = None if link is None else link.compare(name, value, seconds)
        return None if answers is None else answers[0]


@contextmanager
def explaining_lost_workers() -> Iterator[None]:
    """Turns TensorFlow's error for a lost worker into one that names it.

    Steps and loops of this library use it already. In a loop of your own, put it around the calls
    that communicate: a ``tf.function`` with ``GradientAccumulator.reduce``, ``strategy.gather``.

    Raises:
        WorkerLostError: Another worker has ended; the message says which one, how, and what to do.
        ClusterError: Another worker made a different call. Every other error passes
            unchanged.

    Example:
        >>> import tensorflow as tf
        >>> with explaining_lost_workers():
        ...     total = tf.distribute.get_strategy().reduce("SUM", tf.ones([]), axis=None)
        >>> float(total)
        1.0
    """
    with _state.calls.inside(), naming_lost_workers():
        yield


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Does the same around calls that need not communicate, and may take long."""
    try:
        yield
    except Exception as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from error


def _meaning(error: BaseException) -> str | None:
    """Returns what TensorFlow's error says about another worker; None if it is not about one."""
    explained = _explain(error)
    return None if explained is None else _printed(explained)


def _last_words() -> str:
    return _printed(WorkerLostError(_words("nothing, and waits for that worker.")))


def _printed(error: TfMultiGpuError) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}: {error}"


def _lost() -> bool:
    """Returns whether another worker ended before the end of its program."""
    link = _state.link
    return link is not None and any(how != _FINISHED for how in link.ended().values())


def _explain(error: BaseException) -> TfMultiGpuError | None:
    if "tensorflow" not in sys.modules:
        return None  # Importing it to look at an error would take seconds, at the end of a process.
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error)
    different = _DIFFERENT.search(text)
    if different is not None:
        return different_calls(f"TensorFlow says: {different[0].strip()[:_LONGEST]}")
    if not isinstance(error, tuple(getattr(tf.errors, name) for name in _KINDS)):
        return None
    named = _GONE.search(text) is not None
    ended: Mapping[int, str] = {}
    link = _state.link
    if link is not None:
        ended = link.wait_for_end(_NEWS_SECONDS) if named else link.ended()
    if not ended and not named:
        return None
    lines = text.splitlines() or [type(error).__name__]
    said = next((line for line in lines if _GONE.search(line)), lines[-1])
    return WorkerLostError(_words(said, ended, text))


def _words(said: str, ended: Mapping[int, str] | None = None, text: str = "") -> str:
    if ended is None:
        link = _state.link
        ended = {} if link is None else link.ended()
    who = [f"{_name(worker)}: {how}" for worker, how in ended.items()]
    if not who:
        tasks = dict.fromkeys(_TASK.findall(text))
        who = [f"{_name_of_task(job, int(task))}: it does not answer" for job, task in tasks]
    return (
        "Another worker is gone, and the others cannot continue without it. First to go: "
        f"{'; then '.join(who) or 'TensorFlow does not say which'}. Its log has the reason: the "
        "lines of that worker under the launcher, the output of that task of srun, kubectl logs of "
        "that pod. This process cannot take it back. Start all workers again; they resume from the "
        "last checkpoint that they restore. `python -m tfmultigpu launch --restarts 3` does so on "
        f"one machine. TensorFlow says: {said.strip()[:_LONGEST]}"
    )


def different_calls(received: str) -> ClusterError:
    """Returns the error for workers that made different calls."""
    link = _state.link
    here = "This worker" if link is None else f"This is {_name(link.index)}, and it"
    return ClusterError(
        "The workers do not call the same things in the same order, so the tensors of one addition "
        f"do not fit together. {here} stopped in the call that raised this error; another worker "
        "was in another call. Every worker must make the same steps, evaluations, predictions and "
        "checkpoints. Move them out of blocks such as `if worker == 0:`, which are for printing "
        f"and for files of your own. Received: {received}."
    )


def _name(worker: int) -> str:
    cluster = None if process_state.cluster is None else process_state.cluster.cluster
    if cluster is None:
        return f"worker {worker}"
    return f"worker {worker} of {len(cluster.workers)} at {cluster.workers[worker]}"


def _name_of_task(job: str, task: int) -> str:
    cluster = None if process_state.cluster is None else process_state.cluster.cluster
    if cluster is None:
        return f"task {task} of job {job}"
    return _name(task + 1 if cluster.has_chief and job == "worker" else task)


def _how_this_process_ends() -> str:
    # Python sets this when an exception ends the program, before it prints the exception.
    error = getattr(sys, "last_value", None)
    if error is None:
        return _FINISHED
    first = str(error).strip().split("\n", 1)[0][:_LONGEST]
    return f"it ended with {type(error).__name__}" + (f": {first}" if first else "")
