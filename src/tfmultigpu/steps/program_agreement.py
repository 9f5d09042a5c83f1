"""Comparison of the program between workers: model, loss, optimizer and settings.

TensorFlow adds whatever gradients the workers bring. Where one has another loss or activation, the
sum is the gradient of neither, and no error says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu.errors import ClusterError
from tfmultigpu.steps.program_description import describe_model, describe_value
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["ProgramAgreement"]

_LONGEST = 480
_BYTES = 6  # In a number of 64 bits, which has a sign.


class ProgramAgreement:
    """Compares once what a step of several workers is made of, before the first step."""

    def __init__(self, strategy: tf.distribute.Strategy, settings: Mapping[str, Any]) -> None:
        """Takes what beside the model and the optimizer must be alike, by name."""
        self._exchange = WorkerExchange(strategy)
        self.due = self._exchange.workers > 1
        self._settings = dict(settings)

    def check(self, model: Any, optimizer: Any) -> None:
        """Compares with the other workers if that is due; all must call it.

        Raises:
            ClusterError: They differ; the message names in what, with both values.
        """
        if not self.due or tf.inside_function():
            return
        self.due = False
        parts = {
            "model": describe_model(model),
            "optimizer": [describe_value(optimizer)],
            **{name: [describe_value(value)] for name, value in self._settings.items()},
        }
        if (found := self._exchange.find_difference(parts)) is not None:
            name, _ = found
            raise ClusterError(self._difference(name, parts[name]))

    def _difference(self, name: str, lines: list[str]) -> str:
        """Returns the difference from the first other worker; all workers must call it."""
        most = int(self._exchange([len(lines)]).max())
        padded = [*lines, *["nothing"] * (most - len(lines))]
        found = self._exchange.find_difference(dict(enumerate(padded)))
        assert found is not None  # Some part differs, so some line of it does.
        place, other = found
        # All look at the same line, because they tell each other its text.
        texts = [_text(row) for row in self._exchange(_numbers(padded[place]))]
        own = self._exchange.worker
        mine, theirs = _around(texts[own], texts[other])
        return (
            f"The workers train with a different {name}: worker {own} has {mine}, and worker "
            f"{other} has {theirs}. The sum of their gradients would be that of neither. Every "
            "worker must run the same program with the same settings."
        )


def _numbers(text: str) -> list[int]:
    """The beginning of a text, as many numbers for each."""
    data = text.encode("ascii", errors="backslashreplace")[:_LONGEST].ljust(_LONGEST, b"\0")
    return [int.from_bytes(data[i : i + _BYTES], "big") for i in range(0, _LONGEST, _BYTES)]


def _text(numbers: Any) -> str:
    data = b"".join(int(number).to_bytes(_BYTES, "big") for number in numbers)
    return data.rstrip(b"\0").decode("ascii", errors="replace")


def _around(one: str, other: str) -> tuple[str, str]:
    """Two texts, each from a little before they part."""
    equal = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    head, cut = one.partition(":")[0], max(0, equal - 60)
    if cut <= len(head):
        return one, other
    return f"{head}: ...{one[cut:]}", f"{other.partition(':')[0]}: ...{other[cut:]}"
