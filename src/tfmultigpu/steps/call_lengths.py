"""The number of steps in one call into TensorFlow, during which Python cannot hear Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["CallLength"]

# Seconds of a call. What a call costs is some thousandth of that.
_SECONDS = 0.5
# The first steps are not like the others.
_GROWTH = 4


class CallLength:
    """Cuts many steps into calls of about half a second.

    Only calls that were cut are measured, so short ones cost nothing, and workers meet nowhere
    else. All workers cut alike: TensorFlow adds their gradients only in the same round of the same
    call.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Takes the strategy; nothing is known of its steps yet."""
        self._exchange = WorkerExchange(strategy)
        self._steps = 1

    def most(self, steps: int) -> int:
        """Returns how many of ``steps`` steps, at least 1, the next call may take."""
        return min(steps, self._steps)

    @contextmanager
    def measuring(self) -> Iterator[Callable[[int], None]]:
        """Measures a call, up to when what this yields is told how many steps ran."""
        began = time.perf_counter()

        def note(ran: int) -> None:
            if ran:
                seconds = time.perf_counter() - began
                longest = float(self._exchange.floats([seconds]).max())
                fitting = int(ran * _SECONDS / max(longest, 1e-9))
                self._steps = max(1, min(fitting, _GROWTH * ran))

        yield note
