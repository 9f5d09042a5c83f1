"""Another worker is gone, or does something else: which one, how it ended, and what to do now.

TensorFlow ends what waits for a lost worker within some ten seconds, with one of several errors,
and may name the wrong worker. Here they become one error that names the right one.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import tensorflow as tf

from tfmultigpu.clusters.connection import WorkerLink
from tfmultigpu.clusters.exits import (
    Calls,
    Watchdog,
    end_within,
    leave_on_errors,
    let_go_of_the_last_error,
)
from tfmultigpu.clusters.spec import Cluster
from tfmultigpu.errors import TfMultiGpuError, WorkerLostError, WorkersDifferError

__all__ = [
    "different_calls",
    "explaining_lost_workers",
    "link_of_workers",
    "naming_lost_workers",
    "watch",
]

_link: WorkerLink | None = None
_cluster: Cluster | None = None
_calls = Calls()

# How TensorFlow 2.16 to 2.21 puts it that a worker is gone.
_GONE = re.compile(
    r"stopped sending heartbeats|CoordinationService/Heartbeat|Connection reset by peer|"
    r"Socket closed|failed to connect to all addresses|Connection refused|recvmsg:|"
    r"coordination service.*(disconnect|unavailable|shut)",
    re.IGNORECASE,
)
# How it puts it that workers brought different things to one collective.
_DIFFERENT = re.compile(
    r"(Collective instance \S+ expected |Shape mismatch in the collective instance )[^\n\"\\]*"
)
_TASK = re.compile(r"/job:(\w+)/replica:\d+/task:(\d+)")
_KINDS: tuple[type[Exception], ...] = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)
# News of a worker's end comes within milliseconds, but TensorFlow may be faster.
_NEWS_SECONDS = 2.0
_LONGEST = 300
# At the end of a program that cannot have come to a good one.
_EXIT_SECONDS = 8.0
# With which code, a process does not know: sys.exit leaves no trace that could be seen at the end.
_FINISHED = "its program ended without an error, at its last line or by sys.exit"


def watch(cluster: Cluster, link: WorkerLink | None) -> None:
    """Remember the workers of this process, say goodbye to them at its end, and see to that end."""
    global _cluster, _link
    _cluster, _link = cluster, link
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
    Watchdog(link, _calls, _last_words).start()


def link_of_workers() -> WorkerLink | None:
    """The connections to the other workers; `None` where `create_strategy` made none."""
    return _link


@contextmanager
def explaining_lost_workers() -> Iterator[None]:
    """Raises what an error of TensorFlow means where another worker is gone.

    The steps and loops of this library do so by themselves. In a loop written by hand it belongs
    around what communicates: a `tf.function` with `GradientAccumulator.reduce`, `strategy.gather`.

    Raises:
        WorkerLostError: another worker has ended; the message says which one, how, and what to do.
        WorkersDifferError: another worker has called something else meanwhile. Every other error
            passes unchanged.

    Example:
        >>> with explaining_lost_workers():
        ...     total = tf.distribute.get_strategy().reduce("SUM", tf.ones([]), axis=None)
        >>> float(total)
        1.0
    """
    with _calls.inside(), naming_lost_workers():
        yield


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """As `explaining_lost_workers`, around what need not communicate and may take its time."""
    try:
        yield
    except (*_KINDS, tf.errors.InvalidArgumentError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from error


def _meaning(error: BaseException) -> str | None:
    """What an error of TensorFlow that ended the program means, where it is about a worker."""
    explained = _explain(error)
    return None if explained is None else _printed(explained)


def _last_words() -> str:
    return _printed(WorkerLostError(_words("nothing, and waits for that worker.")))


def _printed(error: TfMultiGpuError) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}: {error}"


def _lost() -> bool:
    """Whether another worker has ended otherwise than at the end of its program."""
    return _link is not None and any(how != _FINISHED for how in _link.ended().values())


def _explain(error: BaseException) -> TfMultiGpuError | None:
    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error)
    different = _DIFFERENT.search(text)
    if different is not None:
        return different_calls(f"TensorFlow says: {different[0].strip()[:_LONGEST]}")
    if not isinstance(error, _KINDS):
        return None
    named = _GONE.search(text) is not None
    ended: Mapping[int, str] = {}
    if _link is not None:
        ended = _link.wait_for_end(_NEWS_SECONDS) if named else _link.ended()
    if not ended and not named:
        return None
    lines = text.splitlines() or [type(error).__name__]
    said = next((line for line in lines if _GONE.search(line)), lines[-1])
    return WorkerLostError(_words(said, ended, text))


def _words(said: str, ended: Mapping[int, str] | None = None, text: str = "") -> str:
    if ended is None:
        ended = {} if _link is None else _link.ended()
    who = [f"{_name(worker)}: {how}" for worker, how in ended.items()]
    if not who:
        tasks = dict.fromkeys(_TASK.findall(text))
        who = [f"{_name_of_task(job, int(task))}: it does not answer" for job, task in tasks]
    return (
        "Another worker is gone, and the others cannot go on without it. First to go: "
        f"{'; then '.join(who) or 'TensorFlow does not say which'}. Read its log for the reason "
        "(the lines of that worker under the launcher, the output of that task of srun, kubectl "
        "logs of that pod). This process cannot take it back: start all workers again, and they go "
        "on from the last checkpoint that they restore. `python -m tfmultigpu launch --restarts 3` "
        f"does so on one machine. TensorFlow says: {said.strip()[:_LONGEST]}"
    )


def different_calls(received: str) -> WorkersDifferError:
    """Returns the error for workers that have called different things."""
    here = "This worker" if _link is None else f"This is {_name(_link.index)}, and it"
    return WorkersDifferError(
        "The workers do not call the same things in the same order, and what each brought to one "
        f"addition does not fit together. {here} stopped in the call that raised this; another one "
        "was in another. Every worker must make the same steps, evaluations, predictions and "
        "checkpoints: take them out from behind lines such as `if worker == 0:`, which are for "
        f"printing and for files of your own. Received: {received}."
    )


def _name(worker: int) -> str:
    if _cluster is None:
        return f"worker {worker}"
    return f"worker {worker} of {len(_cluster.workers)} at {_cluster.workers[worker]}"


def _name_of_task(job: str, task: int) -> str:
    if _cluster is None:
        return f"task {task} of job {job}"
    return _name(task + 1 if _cluster.has_chief and job == "worker" else task)


def _how_this_process_ends() -> str:
    # Set where an exception ends the program, before it is printed.
    error = getattr(sys, "last_value", None)
    if error is None:
        return _FINISHED
    first = str(error).strip().split("\n", 1)[0][:_LONGEST]
    return f"it ended with {type(error).__name__}" + (f": {first}" if first else "")
