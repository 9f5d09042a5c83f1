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
    has_ended = threading.Event()

    def say() -> None:
        if not has_ended.wait(_SECONDS) and what not in _said:
            _said.add(what)
            _log.warning(what)

    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    try:
        yield
    finally:
        has_ended.set()
        saying.join()  # Who counts threads finds none left behind.
