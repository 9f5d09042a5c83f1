"""A word on the logger, if something that happens once takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 5.0
_log = logging.getLogger("tfmultigpu")
_said: set[str] = set()


@contextmanager
def saying_if_slow(what: str) -> Iterator[None]:
    """Says, once in this process, what the context does, if it takes more than five seconds."""

    def say() -> None:
        if what not in _said:
            _said.add(what)
            _log.warning(what)

    timer = threading.Timer(_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
