"""The outcome of a verification, as facts and as text."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Difference", "Verification"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One quantity that replicas computed differently from one device.

    Attributes:
        quantity: Its name: ``"loss"``, ``"the state 'path/of/variable'"``.
        one_device: What one device computes, or the element that differs most.
        replicas: What the replicas computed.
    """

    quantity: str
    one_device: float
    replicas: float

    def __str__(self) -> str:
        """Returns the quantity and both numbers."""
        one, other = _apart(self.one_device, self.replicas)
        return f"{self.quantity} is {one} on one device and {other} as computed"


@dataclasses.dataclass(frozen=True)
class Verification:
    """Comparison of a step with one device on the same global batch.

    Attributes:
        outcome: ``"same"``, ``"different"``, or ``"not verified"``.
        rows: Rows that were compared.
        global_rows: Rows of the global batch.
        reason: Why it was not verified, or only in part; empty otherwise.
        differences: What differs; the first is the one a warning names.
        culprit: The first layer, loss or state that depends on how the batch was cut, for a person;
            empty if it was not found.
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
        part = f" ({self.rows} of {self.global_rows} rows compared: {self.reason})"
        where = part if self.rows < self.global_rows else ""
        if self.outcome == "same":
            return f"The step computed what one device computes on the same batch{where}."
        cause = f" The first that depends on the cut is {self.culprit}." if self.culprit else ""
        return (
            f"The result depends on how the batch was cut: {self.differences[0]}{where}.{cause} "
            f"{self.advice}"
        )


def _apart(one: float, other: float) -> tuple[str, str]:
    """Both numbers with as many digits as it takes to tell them apart."""
    for digits in (4, 6, 9, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            return texts
    return texts
