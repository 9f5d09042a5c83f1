"""Fingerprints of the data in checkpoints: a resumed run must read the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfmultigpu.data.resumable import Past, Position, PositionedDataset
from tfmultigpu.errors import CheckpointError
from tfmultigpu.strategies.worker_exchange import WorkerExchange

__all__ = ["DataMarks", "data_mismatch"]

_CURE = (
    "The checkpoints are unchanged. Give the same data and batch size as before, or another "
    "directory to start over. A generator or PyDataset that shuffles by itself needs a function of "
    "the epoch: data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size). Seed everything "
    "random in it."
)


class DataMarks:
    """Fingerprints of two batches of an epoch: the first one, and the last one trained on.

    At the end of an epoch they are those of the finished epoch. All workers must call every method.
    """

    def __init__(
        self, data: PositionedDataset | None, position: Position, exchange: WorkerExchange
    ) -> None:
        """Stores the data of a run and its position in it."""
        self._data = data
        self._position = position
        self._exchange = exchange
        self._past: Past | None = None
        self._passes = 0
        self._expected: tuple[int, tuple[int, int]] | None = None
        self._expected_past: Past | None = None

    def read(self, position: Position) -> dict[str, Any]:
        """Returns the fingerprints for a checkpoint at a position."""
        past = None if position.step or position != self._position else self._past
        return {
            "fingerprint": None if self._data is None else self._data.fingerprint(position.step),
            "past": None if past is None else [past.batches, past.first, past.last],
        }

    def expect(self, metadata: Mapping[str, Any]) -> None:
        """Stores the fingerprints of a checkpoint; call it after restoring the position."""
        self._expected = self._expected_past = self._past = None
        if self._data is None:
            return
        if metadata.get("past") is not None:
            self._past = Past(*metadata["past"])
            self._expected_past = self._past if self._data.is_checked else None
        elif metadata["fingerprint"] is not None and self._data.is_checked:
            self._expected = self._position.step, tuple(metadata["fingerprint"])
        self._data.pass_over(self._position.epoch, self._expected_past)

    def end_epoch(self) -> None:
        """Records the fingerprints of the epoch that ends, here or before the checkpoint."""
        step = self._position.step
        if self._expected is not None and self._data is not None:
            # Resumed at the end of the epoch: this process has read no batch of it.
            (step, (first, last)), self._expected = self._expected, None
            self._past = self._expected_past = Past(step, first, last)
            self._data.pass_over(self._position.epoch + 1, self._past)
            return
        fingerprint = None if self._data is None else self._data.fingerprint(step)
        if self._data is not None:
            self._data.end_pass(step)
            self._passes = self._data.passes
        self._past = None if fingerprint is None else Past(step, *fingerprint)

    def check_finished_epoch(self) -> None:
        """Compares the epoch that ended before the checkpoint; call it before any training.

        Raises:
            CheckpointError: Its batches differ now.
        """
        expected, self._expected_past = self._expected_past, None
        if expected is None or self._data is None:
            return
        found = self._data.found()
        first = found is None or found.first != expected.first
        last = found is None or (found.last is not None and found.last != expected.last)
        short = found is None or found.batches < expected.batches
        if self._exchange([int(first or last or short)]).any():
            batch = "the first batch" if first else f"batch {expected.batches - 1}"
            self._refuse(self._position.epoch - 1, batch)

    def check(self) -> None:
        """Compares the first data after a restart with the data before it, once.

        Raises:
            CheckpointError: Steps read from an iterator of an earlier epoch.
            CheckpointError: The batches differ.
        """
        self.check_finished_epoch()
        if self._reuses_iterator():
            raise CheckpointError(
                "An epoch reads the iterator of the epoch before, so a resumed run would start "
                f"with other batches. Received: steps in epoch {self._position.epoch} without a "
                "new pass. Inside the loop over checkpoints.epochs(...), write: "
                "iterator = iter(checkpoints.data)."
            )
        if self._expected is None or self._data is None:
            return
        (step, expected), self._expected = self._expected, None
        found = self._data.fingerprint(step)
        if self._exchange([int(found != expected)]).any():
            first = found is None or found[0] != expected[0]
            batch = "the first batch" if first else f"batch {step - 1}"
            self._refuse(self._position.epoch, batch)

    def _reuses_iterator(self) -> bool:
        passes = 0 if self._data is None else self._data.passes
        return bool(passes and passes == self._passes and self._position.step)

    def _refuse(self, epoch: int, batch: str) -> None:
        raise data_mismatch(f"epoch {epoch}, in which {batch} differs", _CURE)


def data_mismatch(received: str, cure: str) -> CheckpointError:
    """Returns the error for a run that would resume with other data than it started with."""
    return CheckpointError(
        "The data differs from the data of the checkpoint. The run would train on some examples "
        f"twice and skip others. Received: {received}. {cure}"
    )
