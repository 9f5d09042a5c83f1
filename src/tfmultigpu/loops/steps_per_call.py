"""Choice of the steps per call: the smallest number that hides the cost of a call.

A call of ``k`` steps takes ``call + k * step`` seconds. Both are measured on the first calls, which
train like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tfmultigpu.arguments import check_count

__all__ = ["StepsPerCallTuner", "check_steps_per_call"]

# The part of its time that a call may cost.
_OVERHEAD = 0.05
_MOST = 64
# The longest call in seconds: Ctrl-C and callbacks are handled only between calls.
_LONGEST = 0.5
_PROBE = 8
# Calls of one step, calls of each longer length, and lengths to try. The fastest call of each
# length counts, because other programs only ever make a call slower.
_SINGLES, _CALLS, _ROUNDS = 3, 2, 3


def check_steps_per_call(steps_per_call: Any) -> None:
    """Checks the argument ``steps_per_call``.

    Raises:
        TypeError: It is neither ``"auto"`` nor a whole number.
        ValueError: It is less than 1.
    """
    if not (isinstance(steps_per_call, str) and steps_per_call == "auto"):
        check_count("steps_per_call", steps_per_call, other="'auto'")


class StepsPerCallTuner:
    """Tuner of the steps per call.

    Attributes:
        steps: Steps of the next call.
        known: Whether the search is over.
        call: The fixed cost of a call in seconds; 0 until measured.
        step: The seconds of a step; 0 until measured.
    """

    def __init__(self, agree: Callable[[float], float] = float) -> None:
        """Starts with calls of one step.

        Args:
            agree: Turns the time of this worker into one that all workers use.
        """
        self.steps = 1
        self.known = False
        self.call = self.step = 0.0
        self._agree = agree
        self._traced = False
        self._singles: list[float] = []
        self._times: list[tuple[float, float]] = []
        self._rounds = 0

    def note(self, steps: int, seconds: float) -> None:
        """Records a call that ran ``steps`` steps, at least 1."""
        if self.known:
            return
        seconds = self._agree(seconds)
        if not self._traced:  # The first call includes the tracing.
            self._traced = True
        elif steps == 1:
            self._singles.append(seconds)
            if len(self._singles) == _SINGLES:
                single = min(self._singles)
                self.step = single
                self.steps = max(1, min(_PROBE, int(0.8 * _LONGEST / single)))
                self.known = self.steps == 1
        elif len(self._singles) >= _SINGLES:  # Earlier longer calls were set by the user.
            # The last call of an epoch may be shorter than ``self.steps``.
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
