"""Batches of training, epoch by epoch."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tfmultigpu.data.passes import read_over, replay_of
from tfmultigpu.data.resumable import PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset

__all__ = ["EpochIterator"]

_log = logging.getLogger("tfmultigpu")


class EpochIterator:
    """Iterator over the batches of each epoch, by the rules of Keras.

    Without ``steps_per_epoch`` an epoch is one pass over the data. With it an epoch continues the
    pass of the epoch before. If the data runs out, the epoch ends early with a warning, and the
    next one starts a new pass.

    Attributes:
        steps: Batches of an epoch; None if not known yet.
        iterator: The iterator that a step reads.
    """

    def __init__(
        self,
        batches: ShardedDataset,
        per_pass: int | None,
        steps_per_epoch: int | None,
        *,
        repeats: bool = False,
        describe: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Stores the data.

        Args:
            batches: Shards for the replicas.
            per_pass: Batches of a pass; None if unknown or infinite.
            steps_per_epoch: Batches of an epoch, or None for a pass.
            repeats: Whether one iterator yields pass after pass.
            describe: Returns values in JSON types that identify the data in checkpoints.
        """
        self.steps = steps_per_epoch or per_pass
        self._describe = describe
        self.iterator: Any = None
        self._batches = batches
        self._per_pass = per_pass
        self._asked = steps_per_epoch
        self._repeats = repeats
        self._left: int | None = 0
        self._fresh = False
        self._epoch_left: int | None = None
        self._done = 0
        self._after_skipped_epoch: Callable[[int], None] = lambda epochs: None
        self._unread = 0

    @property
    def description(self) -> dict[str, Any]:
        """Values that identify the data in checkpoints; an unknown value is None."""
        return {**self._fixed_description, "steps": self.steps}

    @functools.cached_property
    def _fixed_description(self) -> Mapping[str, Any]:
        return self._describe()

    def begin_epoch(self) -> None:
        """Begins an epoch, and a new pass if one is due."""
        if self.iterator is None or self._asked is None or self._left == 0:
            self._begin_pass()
        self._epoch_left = self._asked
        self._done = 0

    def most(self, steps: int) -> int:
        """Returns the batches left in this epoch, up to ``steps``; 0 at its end."""
        limits = [one for one in (self._left, self._epoch_left) if one is not None]
        return min([steps, *limits])

    def took(self, ran: int, asked: int) -> bool:
        """Counts the batches that a call ran, of those it asked for.

        Returns:
            Whether the epoch continues.
        """
        self._done += ran
        if self._left is not None:
            self._left -= ran
        if self._epoch_left is not None:
            self._epoch_left -= ran
        if ran < asked:
            self._left = 0
            if self._asked and not self._done and not self._fresh:
                # The earlier pass of unknown length ended exactly with its epoch.
                self._begin_pass()
                return True
        self._fresh = False
        if self._left == 0 and self._epoch_left:
            self._warn()
        continues = self._left != 0 and self._epoch_left != 0
        if not continues and self.steps is None:
            self.steps = self._done
        return continues

    def after_skipped_epochs(self, read: Callable[[int], None], first: int) -> None:
        """Sets a function that reads other data after each skipped epoch.

        Datasets derived from one reshuffled dataset count their passes together, so skipped epochs
        must read all of them in the original order.

        Args:
            read: Reads the other data; its argument is the number of the epoch.
            first: The number of the first epoch.
        """
        self._after_skipped_epoch = lambda epochs: read(first + epochs)
        if isinstance(self._batches, PositionedDataset):
            self._batches.passed_over = read

    def skip(self, epochs: int, step: int, *, data_skips_batches: bool = False) -> int:
        """Skips the batches that a resumed run has trained on; call ``begin_epoch`` first.

        Args:
            epochs: Whole epochs to skip.
            step: Batches of the next epoch to skip.
            data_skips_batches: Whether the data itself skips all of them.

        Returns:
            The skipped batches of the epoch.
        """
        if data_skips_batches:
            self.took(step, step)
            if self._left == 0:
                self._drop(1)  # The data skips batches only when read, and the step reads none.
            return step
        if epochs:
            if self._asked is None and self._repeats:
                for epoch in range(epochs):
                    self._drop(self._per_pass or 0)
                    self._left = self._per_pass
                    self._after_skipped_epoch(epoch)
            elif self._asked is None:
                self._skip_passes(epochs)
            else:
                for epoch in range(epochs):
                    while (asked := self.most(self._asked)) and self.took(self._drop(asked), asked):
                        pass
                    self._after_skipped_epoch(epoch)
                    self.begin_epoch()
        dropped = self._drop(self.most(step))
        self.took(dropped, dropped)
        if self._unread:
            self.iterator, _ = self._batches.iterate_from(self._unread)
        return dropped

    def _skip_passes(self, passes: int) -> None:
        """Skips passes from the current one on; reads as much as later ones depend on."""
        replay = replay_of(self._batches.batches)
        batches = replay.batches
        if replay.python and passes == 1:
            batches = None
        elif replay.python:
            _log.warning(
                "Python makes the data, so fit cannot know whether its batches depend on earlier "
                "passes. If they do, this run resumes with other batches. Write "
                "tmg.Checkpoints(data=...), which compares them."
            )
        for epoch in range(passes):
            read_over(self.iterator.source, batches)
            self._after_skipped_epoch(epoch)
            self._begin_pass()

    def _drop(self, batches: int) -> int:
        if self._repeats and self._batches.preprocessing is not None:
            self._unread += batches  # `skip` begins after all of them.
            return batches
        return read_over(self.iterator.source, batches)

    def _begin_pass(self) -> None:
        if self.iterator is None or not self._repeats:
            self.iterator = iter(self._batches)
        self._left = self._per_pass
        self._fresh = True

    def _warn(self) -> None:
        warnings.warn(
            f"Your input ran out of data: an epoch of {self._asked} batches ends after "
            f"{self._done}, and the next one starts a new pass. The data must yield at least "
            "steps_per_epoch * epochs batches. Add .repeat() to the dataset.",
            stacklevel=4,
        )
