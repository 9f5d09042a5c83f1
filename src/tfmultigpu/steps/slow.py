"""A word on the logger, if something that happens once takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SECONDS = 5.0
_log = logging.getLogger("tfmultigpu")
_said: set[str] = set()
_is_inside = ContextVar("is_inside", default=False)


@contextmanager
def saying_if_slow(what: str, advice: str = "") -> Iterator[None]:
    """Says, once in this process, what takes more than five seconds, and at its end how long.

    A context in this one says nothing: it is a part of what this one says.

    Args:
        what: What is slow, a sentence without its dot.
        advice: What to write to leave it out.
    """
    if _is_inside.get():
        yield
        return
    has_ended, began = threading.Event(), time.monotonic()
    is_said = False

    def say() -> None:
        nonlocal is_said
        if not has_ended.wait(_SECONDS) and what not in _said:
            is_said = True
            _said.add(what)
            _log.warning(f"{what}: {_seconds_since(began)} so far. {advice}".rstrip())

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    before = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(before)
        has_ended.set()
        saying.join()  # Who counts threads finds none left behind.
        if is_said:
            _log.warning(f"{what}: {_seconds_since(began)} in all.")


def _seconds_since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"
