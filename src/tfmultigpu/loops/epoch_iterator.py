"""The batches of training, epoch by epoch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tfmultigpu.data.passes import read_over, replay_of
from tfmultigpu.data.resumable import PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset

__all__ = ["EpochIterator"]

_log = logging.getLogger("tfmultigpu")


class EpochIterator:
    """Hands out the batches of each epoch, by the rules of Keras.

    Without ``steps_per_epoch`` an epoch is one pass over the data. With it an epoch goes on where
    the one before stopped; where the data ends in an epoch that epoch is shorter, which is said,
    and the next begins a new pass.

    Attributes:
        steps: Batches of an epoch; None where not known yet.
        iterator: What a step takes its batches from.
    """

    def __init__(
        self,
        batches: ShardedDataset,
        per_pass: int | None,
        steps_per_epoch: int | None,
        *,
        goes_on: bool = False,
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Takes the data.

        Args:
            batches: Shards for the replicas.
            per_pass: Batches of a pass; None where unknown, or without end.
            steps_per_epoch: Batches of an epoch, or None for a pass.
            goes_on: Whether one iterator yields pass after pass.
            facts: What tells this data from other data, as JSON can hold it.
        """
        self.steps = steps_per_epoch or per_pass
        self._facts = dict(facts)
        self.iterator: Any = None
        self._batches = batches
        self._per_pass = per_pass
        self._asked = steps_per_epoch
        self._goes_on = goes_on
        self._left: int | None = 0
        self._fresh = False
        self._epoch_left: int | None = None
        self._done = 0
        self._read_between: Callable[[int], None] = lambda epochs: None

    @property
    def mark(self) -> dict[str, Any]:
        """What tells this data from other data; a value is None where it is not known."""
        return {**self._facts, "steps": self.steps}

    def begin_epoch(self) -> None:
        """Begins an epoch, and a new pass where it is time for one."""
        if self.iterator is None or self._asked is None or self._left == 0:
            self._begin_pass()
        self._epoch_left = self._asked
        self._done = 0

    def most(self, steps: int) -> int:
        """Returns how many of ``steps`` batches there can be in this epoch; 0 at its end."""
        limits = [one for one in (self._left, self._epoch_left) if one is not None]
        return min([steps, *limits])

    def took(self, ran: int, asked: int) -> bool:
        """Takes note of a call.

        Returns:
            Whether the epoch goes on.
        """
        self._done += ran
        if self._left is not None:
            self._left -= ran
        if self._epoch_left is not None:
            self._epoch_left -= ran
        if ran < asked:
            self._left = 0
            if self._asked and not self._done and not self._fresh:
                # The pass before had ended exactly with its epoch, and nobody knew.
                self._begin_pass()
                return True
        self._fresh = False
        if self._left == 0 and self._epoch_left:
            self._warn()
        goes_on = self._left != 0 and self._epoch_left != 0
        if not goes_on and self.steps is None:
            self.steps = self._done
        return goes_on

    def read_between(self, read: Callable[[int], None], first: int) -> None:
        """Has other data read after each epoch that is passed over, as it was then.

        Datasets made of one that is shuffled anew in each pass count their passes together.

        Args:
            read: What reads it; gets the number of the epoch.
            first: The number of the first epoch.
        """
        self._read_between = lambda epochs: read(first + epochs)
        if isinstance(self._batches, PositionedDataset):
            self._batches.passed_over = read

    def skip(self, epochs: int, step: int, *, done: bool = False) -> int:
        """Passes over what a run that is gone on with has trained on.

        Args:
            epochs: Whole epochs.
            step: Batches of the next epoch, which must have begun with ``begin_epoch``.
            done: Whether the data has passed over all of it by itself.

        Returns:
            Batches of the epoch that were passed over.
        """
        if done:
            self.took(step, step)
            if self._left == 0:
                self._drop(1)  # It passes over them when it is read, and none is left to be read.
            return step
        if epochs:
            if self._asked is None and self._goes_on:
                for epoch in range(epochs):
                    self._drop(self._per_pass or 0)
                    self._left = self._per_pass
                    self._read_between(epoch)
            elif self._asked is None:
                self._pass_over(epochs)
            else:
                for epoch in range(epochs):
                    while (asked := self.most(self._asked)) and self.took(self._drop(asked), asked):
                        pass
                    self._read_between(epoch)
                    self.begin_epoch()
        dropped = self._drop(self.most(step))
        self.took(dropped, dropped)
        return dropped

    def _pass_over(self, passes: int) -> None:
        """Reads what the next pass depends on, from the first on, which was begun."""
        replay = replay_of(self._batches.batches)
        batches = replay.batches
        if replay.python and passes == 1:
            batches = None
        elif replay.python:
            _log.warning(
                "Python makes the data, and fit cannot tell whether its batches depend on earlier "
                "passes. If so, this run goes on with others than it would have had. Give it to "
                "tmg.Checkpoints(data=...), which compares it."
            )
        for epoch in range(passes):
            read_over(self.iterator.source, batches)
            self._read_between(epoch)
            self._begin_pass()

    def _drop(self, batches: int) -> int:
        return read_over(self.iterator.source, batches)

    def _begin_pass(self) -> None:
        if self.iterator is None or not self._goes_on:
            self.iterator = iter(self._batches)
        self._left = self._per_pass
        self._fresh = True

    def _warn(self) -> None:
        warnings.warn(
            f"Your input ran out of data: an epoch of {self._asked} batches ends after "
            f"{self._done}, and the next begins a new pass. Make sure that the data yields at "
            "least steps_per_epoch * epochs batches; you may need .repeat() when building your "
            "dataset.",
            stacklevel=4,
        )
