"""The number of steps in one call into TensorFlow, between which Python hears Ctrl-C."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfmultigpu.strategies.worker_exchange import WorkerExchange


class CallLength:
    """Cuts many steps into calls of some ``seconds``, whose cost is some thousandth of that.

    All workers cut alike: TensorFlow adds their gradients only in the same round of the same call.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        seconds: float = 0.5,
        largest: float = math.inf,
        measured: float = math.inf,
        steps: int = 1,
    ) -> None:
        """Begins with at most ``steps`` in a call, and follows the time of ``measured`` calls."""
        self._exchange = WorkerExchange(strategy)
        self._seconds, self._largest, self._left = seconds, largest, measured
        self.steps = steps

    @contextmanager
    def measuring(self) -> Iterator[Callable[[int], None]]:
        """Measures a call, up to when what this yields is told, by all workers, what ran."""
        began = time.perf_counter()

        def note(ran: int) -> None:
            if ran and self._left:
                self._left -= 1
                seconds = [time.perf_counter() - began]
                longest = float(self._exchange.floats("the seconds of a call", seconds).max())
                fitting = int(ran * self._seconds / max(longest, 1e-9))
                # The first steps are not like the others: not many more at once.
                self.steps = int(max(1, min(fitting, 4 * ran, self._largest)))

        yield note
