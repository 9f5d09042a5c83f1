"""The number of steps in one call into TensorFlow, between which Python hears Ctrl-C."""

from __future__ import annotations

import dataclasses
import math
import time

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
