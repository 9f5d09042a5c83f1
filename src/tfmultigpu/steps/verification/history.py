"""The verifications of this process, for reports."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from tfmultigpu.steps.verification.outcome import Verification

__all__ = ["outcomes", "remember"]


class _Verifies(Protocol):
    verification: Verification | None

    @property
    def variables(self) -> list[Any]:
        """The variables of its model."""


class _History:
    """Whatever verifies and is still in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verifiers: weakref.WeakSet[_Verifies] = weakref.WeakSet()

    def add(self, verifier: _Verifies) -> None:
        with self._lock:
            self._verifiers.add(verifier)

    def __call__(self) -> list[_Verifies]:
        with self._lock:
            return list(self._verifiers)


_history = _History()


def remember(verifier: _Verifies) -> None:
    """Has the outcomes of a verifier reported, for as long as its step is in use."""
    _history.add(verifier)


def outcomes(model: Any = None) -> list[Verification]:
    """Returns the last outcome of each step in use, those that are equal once.

    Args:
        model: The model whose steps are asked for; all if None.
    """
    found = []
    wanted = None if model is None else {id(one) for one in model.variables}
    for verifier in _history():
        known = verifier.verification
        try:
            ours = wanted is None or any(id(one) in wanted for one in verifier.variables)
        except ReferenceError:  # Its model is gone, and its step is about to go.
            continue
        if known is not None and ours and known not in found:
            found.append(known)
    return found
