"""The outcome of a verification, as facts and as text."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Difference:
    """A quantity that replicas computed differently from one device.

    Attributes:
        quantity: Its name: ``"the loss"``, ``"the state 'path/of/variable'"``.
        one_device: The element that differs most, as one device computes it.
        replicas: The same element as the replicas computed it.
    """

    quantity: str
    one_device: float
    replicas: float

    def __str__(self) -> str:
        """Returns the quantity and both numbers, with as many digits as tell them apart."""
        for digits in (4, 6, 9, 17):
            one, other = f"{self.one_device:.{digits}g}", f"{self.replicas:.{digits}g}"
            if one != other:
                break
        return f"{self.quantity} is {one} on one device and {other} as computed"


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of a step with one device on the same global batch.

    Attributes:
        outcome: ``"same"``, ``"different"``, or ``"not verified"``.
        rows: Rows that were compared: all, or 0.
        global_rows: Rows of the global batch.
        reason: Why it was not verified; empty otherwise.
        differences: What differs; a warning names the first.
        culprit: The first layer, loss or state that depends on how the batch was cut; empty if it
            was not found.
        advice: The line to write instead.
    """

    outcome: Literal["same", "different", "not verified"]
    rows: int = 0
    global_rows: int = 0
    reason: str = ""
    differences: tuple[Difference, ...] = ()
    culprit: str = ""
    advice: str = ""

    def __str__(self) -> str:
        """Returns the outcome in a sentence or two."""
        if self.outcome == "not verified":
            return f"Not verified: {self.reason}"
        if self.outcome == "same":
            return "The step computed what one device computes on the same batch."
        what = self.differences[0] if self.differences else "another worker found a difference"
        cause = f" The first that depends on the cut is {self.culprit}." if self.culprit else ""
        return f"The result depends on how the batch was cut: {what}.{cause} {self.advice}"
