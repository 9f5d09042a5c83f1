"""Marks of the data in checkpoints: whether a run that is resumed reads what it had read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfmultigpu.data.resumable import Past, Position, PositionedDataset
from tfmultigpu.errors import CheckpointError, RestoreMismatchError
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["DataMarks", "other_data"]

_CURE = (
    "Nothing was saved since. Give the same data and batch size as then, or another directory to "
    "begin anew. If its order depends on what was read before (a generator or a PyDataset that "
    "shuffles by itself), make the data a function of the epoch: data=lambda epoch: "
    "dataset.shuffle(n, seed=epoch).batch(size), with a seed for everything random in it."
)


class DataMarks:
    """Marks of the batches of a run; every worker must call every method.

    In the middle of an epoch they are those of its first batch and of the last one trained on. At
    its end they are those of the epoch that is over.
    """

    def __init__(
        self, data: PositionedDataset | None, position: Position, exchange: WorkerExchange
    ) -> None:
        """Takes the data of a run, and its place in it."""
        self._data = data
        self._position = position
        self._exchange = exchange
        self._past: Past | None = None
        self._passes = 0
        self._expected: tuple[int, tuple[int, int]] | None = None
        self._expected_past: Past | None = None

    def facts(self, position: Position) -> dict[str, Any]:
        """Returns the marks for a checkpoint at a position."""
        past = None if position.step or position != self._position else self._past
        return {
            "fingerprint": None if self._data is None else self._data.fingerprint(position.step),
            "past": None if past is None else [past.batches, past.first, past.last],
        }

    def expect(self, facts: Mapping[str, Any]) -> None:
        """Takes the marks of a checkpoint, once the position is where it was saved."""
        self._expected = self._expected_past = self._past = None
        if self._data is None:
            return
        if facts.get("past") is not None:
            self._past = Past(*facts["past"])
            self._expected_past = self._past if self._data.is_checked else None
        elif facts["fingerprint"] is not None and self._data.is_checked:
            self._expected = self._position.step, tuple(facts["fingerprint"])
        self._data.pass_over(self._position.epoch, self._expected_past)

    def end_epoch(self) -> None:
        """Notes what the epoch was that ends here, or had ended before the checkpoint."""
        step = self._position.step
        if self._expected is not None and self._data is not None:
            # Resumed where the epoch ended, so that none of it was read.
            (step, (first, last)), self._expected = self._expected, None
            self._past = self._expected_past = Past(step, first, last)
            self._data.pass_over(self._position.epoch + 1, self._past)
            return
        marks = None if self._data is None else self._data.fingerprint(step)
        if self._data is not None:
            self._data.end_pass(step)
            self._passes = self._data.passes
        self._past = None if marks is None else Past(step, *marks)

    def check_past(self) -> None:
        """Compares the epoch that ended before the checkpoint; before anything is trained.

        Raises:
            RestoreMismatchError: It is another one now.
        """
        expected, self._expected_past = self._expected_past, None
        if expected is None or self._data is None:
            return
        found = self._data.found()
        first = found is None or found.first != expected.first
        last = found is None or (found.last is not None and found.last != expected.last)
        short = found is None or found.batches < expected.batches
        if self._exchange([int(first or last or short)]).any():
            what = "its first batch" if first else f"batch {expected.batches - 1}"
            self._refuse(self._position.epoch - 1, what)

    def check(self) -> None:
        """Compares the first data after a restart with what was there before it; once.

        Raises:
            CheckpointError: Steps were made on an iterator of an epoch that is over.
            RestoreMismatchError: It is another one.
        """
        self.check_past()
        if self._goes_on_in_old_pass():
            raise CheckpointError(
                "An epoch goes on with the iterator of the one before, so that a run that is "
                "resumed would begin with other batches. Received: steps in epoch "
                f"{self._position.epoch} without a new pass. Make the iterator inside the loop "
                "over checkpoints.epochs(...): iterator = iter(checkpoints.data)."
            )
        if self._expected is None or self._data is None:
            return
        (step, expected), self._expected = self._expected, None
        found = self._data.fingerprint(step)
        if self._exchange([int(found != expected)]).any():
            first = found is None or found[0] != expected[0]
            what = "its first batch" if first else f"batch {step - 1}"
            self._refuse(self._position.epoch, what)

    def _goes_on_in_old_pass(self) -> bool:
        begun = 0 if self._data is None else self._data.passes
        return bool(begun and begun == self._passes and self._position.step)

    def _refuse(self, epoch: int, what: str) -> None:
        raise other_data(f"epoch {epoch}, in which {what} is another one", _CURE)


def other_data(received: str, cure: str) -> RestoreMismatchError:
    """Returns the error for a run that would go on with other data than it began with."""
    return RestoreMismatchError(
        "The data is not what it was when the checkpoint was saved, so that some examples would "
        f"be trained on twice and others never. Received: {received}. {cure}"
    )
