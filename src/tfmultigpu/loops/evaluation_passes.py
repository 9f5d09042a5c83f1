"""Passes over evaluation data, one after the other."""

from __future__ import annotations

from typing import Any

from tfmultigpu.data.sharded_dataset import ShardedDataset

__all__ = ["EvaluationPasses"]


class EvaluationPasses:
    """Passes over evaluation data, one after the other.

    Of data that goes through pass after pass one iterator serves all of them: making an iterator
    takes longer than reading a small set.

    Attributes:
        batches: Shards for the replicas.
        per_pass: Batches of a pass, if ``batches`` go through pass after pass; otherwise None.
    """

    def __init__(self, batches: ShardedDataset, per_pass: int | None = None) -> None:
        """Stores the data."""
        self.batches = batches
        self.per_pass = per_pass
        self._iterator: Any = None
        self._left: int | None = None

    def begin(self) -> Any:
        """Returns an iterator at the beginning of a pass."""
        if self.per_pass is None or self._left != 0:
            self._iterator = iter(self.batches)
        self._left = self.per_pass
        return self._iterator

    def took(self, batches: int) -> None:
        """Counts batches that were read of the iterator."""
        if self._left is not None:
            self._left -= batches
