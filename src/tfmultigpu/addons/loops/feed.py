"""Data as the loop of Keras takes it; which batch is next is known here, not there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from tfmultigpu import _compat
from tfmultigpu.data.passes import begin_unread, read_over
from tfmultigpu.data.positioned import Position, PositionedDataset
from tfmultigpu.data.sharded_dataset import ShardedDataset

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
        description: Values that identify the data in checkpoints.
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
    ) -> None:
        """Stores the data."""
        self.source, self.batches = source, batches
        self.iterator: Any = None
        self._per_pass, self._asked = per_pass, steps
        self._continues = continues and steps is not None
        self._repeats = repeats
        self._position, self.description = position, dict(description or {})
        known = [most for most in (steps, None if self._continues else per_pass) if most]
        self.steps = min(known, default=None)  # Batches of an epoch; None until they are known.
        self._left_in_pass: int | None = 0
        self._left_in_epoch: int | None = None
        self._done = 0
        self._is_new_pass = False

    # What Keras asks for. ------------------------------------------------------------------------

    batch_size = has_partial_batch = partial_batch_size = None

    @property
    def num_batches(self) -> int:
        """The batches of a pass; ``sys.maxsize`` where Keras could miscount them."""
        return self.steps if self.steps and not self._continues else sys.maxsize

    def get_tf_dataset(self) -> Feed:
        """Returns the dataset that Keras iterates: this object."""
        return self

    def __iter__(self) -> Any:
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Lets go of the iterator, and ends it where a traceback holds it as well."""
        iterator, self.iterator = self.iterator, None
        if iterator is not None and kind is not None:
            iterator.close()
        del iterator  # The thread that reads ahead has ended after this.
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
        limits = [left for left in (self._left_in_pass, self._left_in_epoch) if left is not None]
        return min([steps, *limits])

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
            if self.batches.reader is not None:
                self.batches.reader.end_pass()
            self._iterate()
            if self._position is not None:
                self._position.step_in_epoch = 0
        self._left_in_pass = self._per_pass
        self._is_new_pass = True

    def _iterate(self) -> None:
        self.iterator = None  # It reads no more when a PyDataset hears that the next epoch begins.
        self.iterator = iter(self.batches)

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
            read_over(self.iterator.source, 1)  # It skips when read, and the step reads none.

    def skip_validations(self, validation: Feed, frequency: Any, first: int, begin: int) -> None:
        """Skips the validation after each of the epochs from ``first`` to ``begin``, if it was due.

        Datasets derived from one reshuffled dataset count their passes together, so skipped epochs
        must begin all of them in the original order.
        """

        def skip(epoch: int) -> None:
            every = isinstance(frequency, Collection)
            is_due = epoch + 1 in frequency if every else not (epoch + 1) % int(frequency)
            if is_due and not validation._repeats:
                validation.on_epoch_end()
                validation.begin_epoch()
                if not begin_unread(validation.batches.batches):
                    read_over(validation.iterator.source, validation.steps)
                validation.on_epoch_end()

        if isinstance(self.batches, PositionedDataset):
            self.batches.passed_over = lambda epochs: skip(first + epochs)
        else:
            for epoch in range(first, begin):
                skip(epoch)
