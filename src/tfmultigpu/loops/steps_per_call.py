"""How many steps one call takes: as few as hide what a call costs.

A call of ``k`` steps takes ``call + k * step`` seconds. Both are measured on the first calls, which
train like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tfmultigpu.arguments import check_count

__all__ = ["StepsPerCallTuner", "check_steps_per_call"]

# What a call may cost of the time it takes.
_OVERHEAD = 0.05
_MOST = 64
# Seconds a call may take: Ctrl-C is heard, and a callback called, only between calls.
_LONGEST = 0.5
_PROBE = 8
# Calls of one step, then calls of each length tried; of each the fastest counts, and what follows
# from it is tried next, because other programs make a clock say too much, never too little.
_SINGLES, _CALLS, _ROUNDS = 3, 2, 3


def check_steps_per_call(steps_per_call: Any) -> None:
    """Checks what the user gave.

    Raises:
        TypeError: It is neither ``"auto"`` nor a whole number.
        ValueError: It is less than 1.
    """
    if not (isinstance(steps_per_call, str) and steps_per_call == "auto"):
        check_count("steps_per_call", steps_per_call, other="'auto'")


class StepsPerCallTuner:
    """Finds out how many steps a call should take.

    Attributes:
        steps: Steps to take in the next call.
        known: Whether it has found out.
        call: Seconds that a call costs, whatever it does; 0 until measured.
        step: Seconds that a step takes; 0 until measured.
    """

    def __init__(self, agree: Callable[[float], float] = float) -> None:
        """Takes what turns a time into one that all workers go by."""
        self.steps = 1
        self.known = False
        self.call = self.step = 0.0
        self._agree = agree
        self._traced = False
        self._singles: list[float] = []
        self._times: list[tuple[float, float]] = []
        self._rounds = 0

    def note(self, steps: int, seconds: float) -> None:
        """Takes note of a call; ``steps`` is how many it ran, at least 1."""
        if self.known:
            return
        seconds = self._agree(seconds)
        if not self._traced:  # The first call is traced, and tells nothing.
            self._traced = True
        elif steps == 1:
            self._singles.append(seconds)
            if len(self._singles) == _SINGLES:
                single = min(self._singles)
                self.step = single
                self.steps = max(1, min(_PROBE, int(0.8 * _LONGEST / single)))
                self.known = self.steps == 1
        elif len(self._singles) >= _SINGLES:  # Before, the user alone decides how many steps.
            # Where an epoch ends a call may be shorter than it was meant to be.
            self._times.append(((seconds - min(self._singles)) / (steps - 1), seconds / steps))
            if len(self._times) == _CALLS:
                self._decide()

    def _decide(self) -> None:
        slope, mean = min(self._times)
        self._times.clear()
        self.step = min(max(slope, 1e-6), mean, self.step)
        self.call = max(min(self._singles) - self.step, 0.0)
        wanted = math.ceil(self.call / self.step * (1 / _OVERHEAD - 1))
        self.steps = max(1, min(wanted, _MOST, int(_LONGEST / self.step)))
        self._rounds += 1
        self.known = self._rounds == _ROUNDS or self.steps == 1
