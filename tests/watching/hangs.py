"""What the tests of a watch share: hangs that end once the watch has said the expected words."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 0.3  # Of the watches here: what they say first may be about the trace of a step.
LIMIT = 240.0  # For what fails, far above what anything takes.


class Said(logging.Handler):
    """Collects what is logged, and lets a hang end once some words are among it.

    Attributes:
        texts: What was logged.
        heard: Set once the words were.
    """

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words, self.texts, self.heard = words, list[str](), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if self.words in self.texts[-1]:
            self.heard.set()

    def wait(self) -> None:
        """Hangs until the words were logged."""
        assert self.heard.wait(LIMIT), (self.words, self.texts)

    def said(self) -> str:
        """Returns the first text with the words."""
        return next(text for text in self.texts if self.words in text)


@contextmanager
def hearing(words: str) -> Iterator[Said]:
    log, said = logging.getLogger("tfmultigpu"), Said(words)
    log.addHandler(said)
    try:
        yield said
    finally:
        log.removeHandler(said)


def when_heard(said: Said, release: Callable[[], Any]) -> threading.Thread:
    """Ends a hang from another thread, once the words were logged."""

    def wait() -> None:
        if said.heard.wait(LIMIT):
            release()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def report_in(folder: Path) -> Any:
    (file,) = folder.glob("watch-*.json")
    return json.loads(file.read_text())
