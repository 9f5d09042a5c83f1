"""The likely cause of a wait, from what processes say of themselves.

A process has a clue of its own, such as a generator that has not returned. Over all workers the
first kind of clue counts that some worker has: the others wait for that one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfmultigpu.addons.watching.gpus import in_words
from tfmultigpu.addons.watching.stacks import last_own, passes, place, takes_lock
from tfmultigpu.errors import TfMultiGpuError

# Clues that say why a process does not continue, whatever the others do.
_CAUSES = ("save", "deadlock", "generator", "py_function", "lock", "metric")
_IDLE = 0.1  # Of one processor.
_ENQUEUER = "data_adapters/py_dataset_adapter.py"  # Of Keras, for data with workers.


# What one process knows. --------------------------------------------------------------------------


def clue_of(state: Mapping[str, Any], threads: Sequence[Any]) -> Any:
    """Returns what this process waits for: a kind and a sentence; None if only that it waits.

    Args:
        state: What it is in, see ``states.describe``.
        threads: Its threads.
    """
    frames: list[Any] = []
    for thread in threads:
        if thread["id"] == state["thread"]:
            frames = thread["frames"]
    if state["phase"] in ("save", "restore"):
        return ["save", _of_disk(state, frames)]
    locked = []
    for thread in threads:
        if takes_lock(thread["frames"]) is not None:
            locked.append(thread)
    if len(locked) > 1:
        said = []
        for thread in locked:
            said.append(f"thread {thread['name']!r} at {place(takes_lock(thread['frames']))}")
        return [
            "deadlock",
            f"{' and '.join(said)} wait for locks, probably for each other's, which is a "
            "deadlock; let all threads take the locks in one order",
        ]
    if _reads(state, frames) and (of_data := _of_py_dataset(threads)):
        return ["generator", of_data]
    for thread in threads:
        code = last_own(thread["frames"])
        if code is None or not passes(thread["frames"], "ops/script_ops.py"):
            continue
        if not passes(thread["frames"], "data/ops/from_generator_op.py"):
            return ["py_function", f"a tf.py_function has not returned, at {place(code)}"]
        if _reads(state, frames):
            return ["generator", f"the generator of the data has not yielded, at {place(code)}"]
    if frames and (taking := takes_lock(frames)) is not None:
        return ["lock", f"it waits for a lock that another thread holds, at {place(taking)}"]
    code = last_own(frames)
    at = "" if code is None else f", at {place(code)}"
    if passes(frames, "/metrics/", "result") and passes(frames, "python/distribute/"):
        text = "it waits in result() of a metric, which adds the values of all workers"
        return ["metric", f"{text}{at}; call it on every worker"]
    if state["first"]:
        return ["compile", f"the first step of its kind is traced and compiled{at}"]
    if state["phase"] == "next batch" or (state["phase"] is None and _in_iterator(frames)):
        return ["input", f"it waits for tf.data, which makes the next batch without Python{at}"]
    if state["phase"] is None and passes(frames, "framework/ops.py", "numpy"):
        return ["read", f"it waits for the result of a device{at}"]
    if state["phase"] is None or _in_callback(frames):
        return ["code", f"it is in your own code{at}"]
    return None


def _of_py_dataset(threads: Sequence[Any]) -> str:
    """Returns which line of a PyDataset blocks, in a thread of Keras or of tf.data; "" for none."""
    waits = False
    for thread in threads:
        if not passes(thread["frames"], _ENQUEUER):
            continue
        code = last_own(thread["frames"])
        if code is not None and passes(thread["frames"], "", "__getitem__"):
            return f"__getitem__ of the PyDataset has not returned, at {place(code)}"
        waits = waits or passes(thread["frames"], _ENQUEUER, "get")
    if not waits:
        return ""
    return (
        "a worker process of the PyDataset has not returned a batch; with "
        "use_multiprocessing=False its line is known"
    )


def _in_callback(frames: Sequence[Any]) -> bool:
    """Returns whether the innermost code of the user was called as a callback."""
    for number in reversed(range(len(frames))):
        if frames[number]["own"]:
            return passes(frames[:number], "callbacks/callback_list.py")
    return False


def _reads(state: Mapping[str, Any], frames: Sequence[Any]) -> bool:
    """Returns whether a process waits for data, as far as that can be seen from outside."""
    if state["phase"] is None:
        return _in_iterator(frames)
    return state["last"] is not None or state["phase"] in ("next batch", "logs", "batch")


def _in_iterator(frames: Sequence[Any]) -> bool:
    return passes(frames, "data/ops/iterator_ops.py")


def _of_disk(state: Mapping[str, Any], frames: Sequence[Any]) -> str:
    disk = state.get("disk")
    room = "its disk does not answer"
    if disk is not None:
        room = f"its disk has {disk['free']:,} of {disk['total']:,} bytes free"
    at = f", at {place(frames[-1])}" if frames else ""
    return f"the {state['phase']} of {state['what']} has not ended{at}; {room}"


# What all of them know. ---------------------------------------------------------------------------


def in_a_line(state: Mapping[str, Any]) -> str:
    """Returns what a process is in, and for how long."""
    who = "The process"
    if state["workers"] > 1:
        who = f"Worker {state['worker']} of {state['workers']}"
    since = f"for {state['seconds']:.0f} s"
    phase, what, number, last = (state[name] for name in ("phase", "what", "number", "last"))
    if phase is None:
        at = "" if state["where"] is None else f", at {place(state['where'])}"
        done = state["done"]
        ended = "" if done is None else f"; the last was step {done['number']} of {done['what']}"
        return f"{who} is in no call {since}{ended}{at}"
    if phase == "next batch":
        return f"{who} waits for batch {number} {what} {since}"
    shapes = f", shapes {', '.join(map(str, state['shapes']))}" if state["shapes"] else ""
    if phase == "call" and last is not None and last != number:
        return f"{who} is in steps {number} to {last} of {what}, which read their batches, {since}"
    if phase == "call":
        return f"{who} is in step {number} of {what} {since}{shapes}"
    numbered = "" if number is None else f", number {number},"
    of = f" ({what})" if what else ""
    return f"{who} is in the phase {phase!r}{numbered} {since}{of}"


def likely_cause(states: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns the likely cause in a sentence.

    Args:
        states: What each worker does; a process by itself is worker 0.
    """
    several = len(states) > 1
    for worker, state in states.items():
        if "silent" in state:
            return (
                f"Worker {worker} does not answer: it is stopped (SIGSTOP, Ctrl-Z, a debugger), or "
                "its machine or network is. The others wait for it."
            )
        if "ended" in state:
            return f"Worker {worker} has ended, and the others wait for it: {state['ended']}."
    known = {worker: state for worker, state in states.items() if "unwatched" not in state}
    kinds: dict[str, dict[int, str]] = {}
    for worker, state in known.items():
        kind, text = state["clue"] or ("wait", "")
        kinds.setdefault(kind, {})[worker] = text
    for kind in _CAUSES:
        waits = kinds.get(kind, {})
        if waits and not (kind == "metric" and len(waits) == len(states)):
            worker, text = next(iter(waits.items()))
            return _named(worker, text, several) + (" The others wait for it." if several else "")
    if "compile" in kinds:
        worker, text = next(iter(kinds["compile"].items()))
        return f"This is not a hang. {_named(worker, text, several)} Later steps take less."
    return _of_progress(known, kinds)


def _named(worker: int, text: str, several: bool) -> str:
    if several:
        return f"Worker {worker}: {text}."
    return f"{text[0].upper()}{text[1:]}."


def _of_progress(
    known: Mapping[int, Mapping[str, Any]], kinds: Mapping[str, Mapping[int, str]]
) -> str:
    """Returns the likely cause where no process has one of its own: who is behind whom."""
    waiting = [worker for worker, state in known.items() if state["clue"] is None]
    for kind in ("input", "code", "read"):
        for worker, text in kinds.get(kind, {}).items():
            if not waiting:
                return _named(worker, text, len(known) > 1)
            behind, ahead = known[worker], known[waiting[0]]
            lines = f"{in_a_line(behind)}. {in_a_line(ahead)} and waits for it."
            if kind != "code":
                return lines
            return f"{lines} Worker {worker} had a batch less, or left its loop before the others."
    calls = {(state["phase"], state["what"], state["number"]) for state in known.values()}
    if len(calls) > 1:
        return f"The workers are in different calls. {'. '.join(map(in_a_line, known.values()))}."
    for state in known.values():
        if said := in_words(state.get("gpus", [])):
            return f"{said}."
    busy = [state.get("cpu", 0.0) > _IDLE for state in known.values()]
    if any(busy):
        return "It computes on the CPU: a long step is not a hang."
    return "It waits inside TensorFlow, without computing, for another device or worker."


# Reports in files. --------------------------------------------------------------------------------


def read_reports(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the reports in files and folders.

    Raises:
        TfMultiGpuError: A file is not a report, or there is none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("watch-*.json")) if path.is_dir() else [path]
    reports = []
    for file in files:
        try:
            report = json.loads(file.read_text("utf-8"))
            reports.append({**report, "threads": report["threads"], "clue": report["clue"]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _no_report(f"{file}: {error!r}") from error
    if not reports:
        raise _no_report(", ".join(paths))
    return reports


def _no_report(received: str) -> TfMultiGpuError:
    return TfMultiGpuError(
        "This is not a report of tmg.watch.",
        received,
        "Give the files or the folder that the log names: python -m tfmultigpu doctor --watch "
        "FOLDER.",
    )


def states_of(reports: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Returns what each worker does: by its own report, else as another one has heard."""
    states: dict[int, Mapping[str, Any]] = {}
    for report in reports:
        for worker, state in report["others"].items():
            if "silent" not in states.get(int(worker), {"silent": True}):
                continue
            states[int(worker)] = state
    for number, report in enumerate(reports):
        states[number if report["worker"] is None else report["worker"]] = report
    return dict(sorted(states.items()))


def in_words_of(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns what the processes of one run are in, a line for each, and the likely cause."""
    states = states_of(reports)
    lines = []
    for state in states.values():
        if "phase" in state:
            lines.append(f"{in_a_line(state)}.")
    return "\n".join([*lines, f"Likely cause: {likely_cause(states)}"])
