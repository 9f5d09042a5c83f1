"""The stacks of all Python threads, and what a stack says about a wait; in JSON types."""

from __future__ import annotations

import linecache
import re
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tfmultigpu import _compat

NAME = "tfmultigpu-watch"  # Of threads that are left out.
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_NOT_OF_USERS = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]), "<")
# A statement on which a thread stands while it takes a lock; what waits for a queue or an event
# stands in the module of these.
_TAKES_LOCK = re.compile(r"^(?:async )?with\b|\.acquire\(")


def threads_now() -> list[Any]:
    """Returns each thread: its name, whether it is the main one, and its frames, the last inside.

    A frame has ``file``, ``line``, ``function``, ``code``, and whether it is the user's ``own``.
    """
    known = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    threads = []
    for number, frame in _compat.frames_of_threads().items():
        thread = known.get(number)
        # A thread of TensorFlow that runs Python has no name.
        name = "of TensorFlow" if thread is None else thread.name
        if name.startswith(NAME):
            continue
        frames = _frames(frame)
        threads.append({"id": number, "name": name, "main": number == main, "frames": frames})
    return threads


def _frames(innermost: FrameType | None) -> list[Any]:
    frames = []
    frame = innermost
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        frames.append(
            {
                "file": file,
                "line": line,
                "function": frame.f_code.co_name,
                "code": linecache.getline(file, line).strip(),
                "own": not (_PACKAGES.search(file) or file.startswith(_NOT_OF_USERS)),
            }
        )
        frame = frame.f_back
    return frames[::-1]


def place(frame: Any) -> str:
    """Returns where a frame stands, for a person."""
    code = f" `{frame['code']}`" if frame["code"] else ""
    return f"{Path(frame['file']).name}:{frame['line']}{code} in {frame['function']}"


def last_own(frames: Sequence[Any]) -> Any:
    """Returns the innermost frame of the user's code; None if there is none."""
    for frame in reversed(frames):
        if frame["own"]:
            return frame
    return None


def passes(frames: Sequence[Any], file: str, *functions: str) -> bool:
    """Returns whether a stack passes through one of these functions of such a file, or through any.

    Args:
        frames: The stack.
        file: A part of the path of the file.
        *functions: The names of functions; none means all of the file.
    """
    for frame in frames:
        path = frame["file"].replace("\\", "/")
        if file in path and (not functions or frame["function"] in functions):
            return True
    return False


def takes_lock(frames: Sequence[Any]) -> Any:
    """Returns the frame that takes a lock which another thread holds, or None."""
    last = frames[-1]
    if last["function"] == "enter_context" and len(frames) > 1:
        return frames[-2]
    if _TAKES_LOCK.search(last["code"]) and Path(last["file"]).name != "threading.py":
        return last
    return None
