"""Data as the loop of Keras takes it; which batch is next is known here, not there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.passes import begin_unread, graph_of, read_over
from tfmultigpu.data.positioned import Position, PositionedDataset
from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.data.sharded_dataset import ShardedDataset
from tfmultigpu.types import FitStart

_DataAdapter: Any = _compat.data_adapter()


class Feed(_DataAdapter, tf.distribute.DistributedDataset):  # type: ignore[misc]
    """Batches of each epoch, by the rules of Keras: its adapter, dataset and iterator in one.

    Keras only counts. It would build the model from a batch that it reads, make iterators that it
    drops, and count one batch too many where a length is unknown.

    Without ``steps`` an epoch is one pass over the data. With them an epoch of training continues
    the pass of the epoch before. If the data runs out, the epoch ends early with a warning, and
    the next one starts a new pass.

    Attributes:
        source: The data of the user.
        batches: The data as shards for the replicas.
        iterator: The iterator that a step reads.
        steps: Batches of an epoch; None until they are known.
        description: Values that identify the data in checkpoints.
        weights: What of the user gives its batches sample weights; empty if nothing does.
    """

    def __init__(
        self,
        source: Any,
        batches: ShardedDataset,
        per_pass: int | None,
        steps: int | None = None,
        *,
        continues: bool = False,
        repeats: bool = False,
        position: Position | None = None,
        description: Mapping[str, Any] | None = None,
        weights: str = "",
    ) -> None:
        # ``per_pass``: the batches of a pass, if known. ``repeats``: one iterator yields pass after
        # pass. ``position``: where a pass begins, if it is for this object to move.
        self.source, self.batches = source, batches
        self.iterator: ShardIterator | None = None
        self.description, self.weights = dict(description or {}), weights
        self._per_pass, self._asked, self._repeats = per_pass, steps, repeats
        self._continues = continues and steps is not None
        self._position = position
        self.steps = steps or None
        if per_pass and not self._continues:
            self.steps = min(per_pass, steps or per_pass)
        self._left_in_pass: int | None = 0
        self._left_in_epoch: int | None = None
        self._done = 0
        self._is_new_pass = False

    # What Keras asks for. ------------------------------------------------------------------------

    batch_size = has_partial_batch = partial_batch_size = None

    @property
    def num_batches(self) -> int:
        """The batches of a pass; ``sys.maxsize`` where Keras could miscount them."""
        if self._continues or not self.steps:
            return sys.maxsize
        return self.steps

    def get_tf_dataset(self) -> Feed:
        """Returns the dataset that Keras iterates: this object."""
        return self

    def __iter__(self) -> Feed:
        """Returns the iterator that Keras hands to a step: this object."""
        return self

    def __next__(self) -> Any:
        """Returns the type specs of a batch, from which Keras would build the model."""
        return self.element_spec

    @property
    def element_spec(self) -> Any:
        """The type specs of a batch."""
        return self.batches.cut.element_spec

    def on_epoch_end(self) -> None:
        """Ends an epoch, or what was before the first one, for an object of the user that asks."""
        if self.batches.reader is not None:
            self.batches.reader.end()

    # What owns the iterator. ---------------------------------------------------------------------

    def __enter__(self) -> Feed:
        """Returns the feed, which keeps an iterator for the length of this block only."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Ends the iterator, and the pass of an object of the user."""
        self._end_reading()
        if self.batches.reader is not None:
            self.batches.reader.end_pass()
            self.batches.reader.read_by(None, continues=False)

    # What the steps ask for. ---------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Begins an epoch, and a new pass if one is due."""
        reader = self.batches.reader
        if reader is not None:
            reader.read_by(self._asked, continues=self._continues)
        if self.iterator is None or not self._continues or self._left_in_pass == 0:
            self._begin_pass()
        elif reader is not None:  # The iterator of the epoch before has read no further than that.
            self._iterate()
        self._left_in_epoch, self._done = self._asked, 0

    def most(self, steps: int) -> int:
        """Returns the batches left in this epoch, up to ``steps``; 0 at its end."""
        for left in (self._left_in_pass, self._left_in_epoch):
            if left is not None:
                steps = min(steps, left)
        return steps

    def took(self, ran: int, asked: int) -> bool:
        """Counts the batches that ran of those asked for; returns whether the epoch continues."""
        self._done += ran
        if self._left_in_pass is not None:
            self._left_in_pass -= ran
        if self._left_in_epoch is not None:
            self._left_in_epoch -= ran
        if ran < asked:
            self._left_in_pass = 0
            if self._continues and not self._done and not self._is_new_pass:
                # The earlier pass of unknown length ended exactly with its epoch.
                self._begin_pass()
                return True
        self._is_new_pass = False
        if self._continues and self._left_in_pass == 0 and self._left_in_epoch:
            self._warn()
        continues = self._left_in_pass != 0 and self._left_in_epoch != 0
        if not continues and self.steps is None:
            self.steps = self._done
        return continues

    def _begin_pass(self) -> None:
        # One iterator of pass after pass goes on, unless a pass was broken off.
        if self.iterator is None or not self._repeats or self._left_in_pass:
            self._end_reading()
            if self.batches.reader is not None:
                self.batches.reader.end_pass()
            self._iterate()
            if self._position is not None:  # The next one begins with its first batch.
                self._position.end_epoch()
        self._left_in_pass = self._per_pass
        self._is_new_pass = True

    def _iterate(self) -> None:
        self._end_reading()  # Before a PyDataset hears that the next epoch begins.
        self.iterator = iter(self.batches)

    def _end_reading(self) -> None:
        """Ends the threads that read ahead, whatever else refers to the iterator."""
        iterator, self.iterator = self.iterator, None
        if iterator is not None:
            iterator.close()

    def _warn(self) -> None:
        warnings.warn(
            f"Your input ran out of data: an epoch of {self._asked} batches ends after "
            f"{self._done}, and the next one starts a new pass. The data must yield at least "
            "steps_per_epoch * epochs batches. Add .repeat() to the dataset.",
            stacklevel=2,
        )

    # Where a resumed run begins. -----------------------------------------------------------------

    def skip(self, step: int) -> None:
        """Counts batches of the first epoch that an earlier process has trained on."""
        self.took(step, step)
        if self._left_in_pass == 0 and isinstance(self.batches, PositionedDataset):
            self._read_over(1)  # It skips when read, and the step reads none.

    def pass_over_validations(
        self, validation: Feed, frequency: int | Collection[int], start: FitStart
    ) -> None:
        """Passes over the validations that were due in the epochs before the start.

        Datasets derived from one reshuffled dataset count their passes together, so skipped epochs
        must begin all of them in the original order.
        """

        def pass_over(epoch: int) -> None:
            if isinstance(frequency, Collection):
                is_due = epoch + 1 in frequency
            else:
                is_due = (epoch + 1) % int(frequency) == 0
            if is_due:
                validation.pass_over()

        if isinstance(self.batches, PositionedDataset):
            self.batches.call_after_passing_over(
                lambda epochs: pass_over(start.first_epoch + epochs)
            )
        else:
            for epoch in range(start.first_epoch, start.epoch):
                pass_over(epoch)

    def pass_over(self) -> None:
        """Begins and ends an epoch of which nothing is used, if the order of the next asks for it.

        Passes that one iterator repeats are the same ones.
        """
        if self._repeats:
            return
        self.on_epoch_end()
        self.begin_epoch()
        if not begin_unread(graph_of(self.batches.batches)):
            self._read_over(self.steps)
        self.on_epoch_end()

    def _read_over(self, batches: int | None) -> None:
        assert self.iterator is not None
        read_over(self.iterator.source, batches)
