"""The pace of calls into TensorFlow: the steps of one call, and a word if something is slow."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import tensorflow as tf

from tfmultigpu.strategies.worker_exchange import WorkerExchange


@dataclasses.dataclass
class CallLength:
    """Cuts many steps into calls of some ``seconds``, whose cost is some thousandth of that.

    All workers cut alike: TensorFlow adds their gradients only in the same round of the same call.

    Attributes:
        largest: The most steps in a call.
        measured: How many calls are measured.
        steps: The steps of the next call.
    """

    strategy: tf.distribute.Strategy
    seconds: float = 0.5
    largest: float = math.inf
    measured: float = math.inf
    steps: int = 1

    def note(self, ran: int, began: float) -> None:
        """Notes how many steps ran since ``time.perf_counter()`` was this; all workers call it."""
        if ran and self.measured:
            self.measured -= 1
            exchange, seconds = WorkerExchange(self.strategy), [time.perf_counter() - began]
            longest = float(exchange.floats("the seconds of a call", seconds).max())
            fitting = int(ran * self.seconds / max(longest, 1e-9))
            # The first steps are not like the others: not many more at once.
            self.steps = int(max(1, min(fitting, 4 * ran, self.largest)))


# A word on the logger if something that happens once takes long -----------------------------------


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
