"""The state of this process, in JSON types: for other workers in short, for a report in full."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tfmultigpu.addons.watching.causes import clue_of
from tfmultigpu.addons.watching.gpus import read_activity
from tfmultigpu.addons.watching.stacks import NAME, last_own, threads_now
from tfmultigpu.recorder import Note, recorder
from tfmultigpu.strategies.process_state import process_state

_Result = TypeVar("_Result")
_SAMPLE_SECONDS = 0.5  # In which it is seen whether the process computes.
_ASK_SECONDS = 3.0
_DISK_SECONDS = 2.0


def within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Returns what a function returns; raises ``TimeoutError`` if it takes longer.

    A disk or a driver that does not answer then holds a thread that nobody waits for.
    """
    results: list[_Result] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, name=f"{NAME} helper", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def describe() -> dict[str, Any]:
    """Returns what this process does; other workers ask for it."""
    return _state(threads_now())


def report() -> dict[str, Any]:
    """Returns all that is known: the state, the threads, the last calls, GPUs, other workers."""
    before = time.monotonic(), time.process_time()
    time.sleep(_SAMPLE_SECONDS)
    cpu = (time.process_time() - before[1]) / (time.monotonic() - before[0])
    threads = threads_now()
    state = {**_state(threads), "cpu": round(cpu, 2)}
    if state["phase"] in ("save", "restore"):
        state["disk"] = _disk(Path(state["what"]))
    with contextlib.suppress(TimeoutError):
        state["gpus"] = within(_DISK_SECONDS, read_activity)
    state["clue"] = clue_of(state, threads)
    return {
        **state,
        "program": sys.argv[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "others": _others(),
        "calls": [_of_note(note) for note in list(recorder.notes)],
        "threads": threads,
    }


def _state(threads: list[Any]) -> dict[str, Any]:
    cluster = process_state.cluster
    note, since = recorder.longest_wait()
    state: dict[str, Any] = {
        "worker": getattr(cluster, "index", None),
        "workers": len(getattr(cluster, "workers", "1")),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "seconds": round(time.monotonic() - since, 1),
        **(_NO_CALL if note is None else _of_note(note)),
        "first": note is not None and _compiles(note),
        "done": _last_done(),
    }
    state |= {"thread": None, "where": None}
    waits = threading.main_thread().ident if note is None else note.thread
    for thread in threads:
        if thread["id"] == waits:
            state |= {"thread": waits, "where": last_own(thread["frames"])}
    state["clue"] = clue_of(state, threads)
    return state


_NO_CALL: dict[str, Any] = {"phase": None, "what": "", "number": None, "last": None, "shapes": []}


def _of_note(note: Note) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "phase": note.phase,
        "what": note.what,
        "number": note.number,
        "last": note.last,
        "shapes": list(map(str, note.shapes)),
        "began": round(now - note.began, 3),  # Seconds ago.
        "took": None if note.ended is None else round(note.ended - note.began, 6),
    }


def _compiles(note: Note) -> bool:
    """Returns whether a call traces, or is the first one after a trace, which compiles."""
    if note.phase == "trace":
        return True
    own = [other for other in list(recorder.notes) if other.thread == note.thread]
    traces = [other.began for other in own if other.phase == "trace"]
    if not traces or note.phase != "call":
        return False
    for other in own:
        if other.phase == "call" and other.ended is not None and other.ended >= traces[-1]:
            return False
    return True


def _last_done() -> Any:
    """Returns the last call of a step that has ended; None if none has."""
    for note in reversed(list(recorder.notes)):
        if note.phase == "call" and note.ended is not None:
            return {"what": note.what, "number": note.last or note.number}
    return None


def _others() -> dict[str, Any]:
    """Returns the state of each other worker, by its number as a text."""
    cluster = process_state.cluster
    if cluster is None or len(cluster.workers) == 1:
        return {}
    answers = cluster.states(_ASK_SECONDS)
    others: dict[str, Any] = {}
    for worker in range(len(cluster.workers)):
        if worker != cluster.index:
            state = answers.get(worker, {"silent": True})
            others[str(worker)] = {"unwatched": True} if state is None else state
    return others


def _disk(path: Path) -> Any:
    """Returns the bytes of the disk of a file; None if it does not answer."""

    def ask() -> dict[str, Any]:
        for folder in path.parents:
            if folder.exists():
                usage = shutil.disk_usage(folder)
                return {"free": usage.free, "total": usage.total}
        raise FileNotFoundError(path)

    try:
        return within(_DISK_SECONDS, ask)
    except (OSError, TimeoutError):
        return None
