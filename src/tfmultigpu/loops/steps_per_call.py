"""How many steps one call takes: as few as hide what a call costs.

A call of ``k`` steps takes ``call + k * step`` seconds. Both are measured on the first calls, which
train like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["Pace", "check_steps_per_call"]

# What a call may cost of the time it takes.
_OVERHEAD = 0.05
_MOST = 64
# Seconds a call may take: Ctrl-C is heard, and a callback called, only between calls.
_LONGEST = 0.5
_PROBE = 8
_SINGLES, _PROBES = 3, 2


def check_steps_per_call(steps_per_call: Any) -> None:
    """Checks what the user gave.

    Raises:
        ValueError: It is neither ``"auto"`` nor a whole number.
    """
    if steps_per_call != "auto" and (
        isinstance(steps_per_call, (bool, str))
        or int(steps_per_call) != steps_per_call
        or steps_per_call < 1
    ):
        raise ValueError(
            "steps_per_call is 'auto' or a whole number, at least 1. Received: "
            f"steps_per_call={steps_per_call!r}."
        )


class Pace:
    """Finds out how many steps a call should take.

    Attributes:
        call: Seconds that a call costs, whatever it does; 0 until known.
        step: Seconds that a step takes; 0 until known.
    """

    def __init__(self, agree: Callable[[float], float] = float) -> None:
        """Takes what turns a time into one that all workers go by."""
        self.call = self.step = 0.0
        self._agree = agree
        self._calls = 0
        self._singles: list[float] = []
        self._probes: dict[int, list[float]] = {}
        self._decided: int | None = None

    @property
    def steps(self) -> int:
        """Steps to take in the next call."""
        if self._decided is not None:
            return self._decided
        # The first call is traced, and tells nothing.
        return 1 if self._calls < 1 + _SINGLES else self._probe

    @property
    def known(self) -> bool:
        """Whether it has found out."""
        return self._decided is not None

    @property
    def _probe(self) -> int:
        return max(1, min(_PROBE, int(0.8 * _LONGEST / min(self._singles))))

    def note(self, steps: int, seconds: float) -> None:
        """Takes note of a call; ``steps`` is how many it ran, at least 1."""
        if self.known:
            return
        seconds = self._agree(seconds)
        self._calls += 1
        if self._calls == 1:
            return
        if steps == 1:
            self._singles.append(seconds)
        else:
            self._probes.setdefault(steps, []).append(seconds)
        if len(self._singles) >= _SINGLES and self._probe == 1:
            self._decide(1, min(self._singles))
        measured = [probe for probe, times in self._probes.items() if len(times) >= _PROBES]
        if self._singles and measured and not self.known:
            self._decide(measured[0], min(self._probes[measured[0]]))

    def _decide(self, probe: int, seconds: float) -> None:
        single = min(self._singles)
        slope = (seconds - single) / (probe - 1) if probe > 1 else single
        # A clock that was disturbed may say less than nothing, or more than the whole.
        self.step = min(max(slope, 1e-6), seconds / probe)
        self.call = max(single - self.step, 0.0)
        wanted = math.ceil(self.call / self.step * (1 / _OVERHEAD - 1))
        self._decided = max(1, min(wanted, _MOST, int(_LONGEST / self.step)))
