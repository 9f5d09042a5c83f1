"""Data that a run can go on with: passes begin where the run is, and are checked to be the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.data import ShardedDataset, ShardIterator, distribute_dataset
from tfmultigpu.data_passes import Replay, replay_of
from tfmultigpu.errors import CheckpointError
from tfmultigpu.sources import to_dataset

__all__ = ["Past", "Position", "PositionedDataset", "position_data"]

_SAMPLED_ROWS = 4
_NONE = -1


@dataclasses.dataclass
class Position:
    """Where a run is in its data.

    Attributes:
        epoch: Whole passes so far.
        step: Batches of the present pass so far.
    """

    epoch: int = 0
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Past:
    """What a pass that is over was.

    Attributes:
        batches: Batches that were trained on.
        first: Mark of the first batch.
        last: Mark of the last of them; None where it was not read.
    """

    batches: int
    first: int | None
    last: int | None


class PositionedDataset(ShardedDataset):
    """Shards for the replicas, of which a pass begins at a position.

    Attributes:
        passes: Passes begun so far, those passed over included.
        was_read: Whether a pass was begun in this process.
        is_checked: Whether batches leave fingerprints.
    """

    def __init__(
        self,
        whole: ShardedDataset,
        position: Position,
        fingerprints: _Fingerprints | None,
        begin: Callable[[Position], ShardedDataset] | None,
        again: Callable[[int], Any],
        replay: Replay | None,
    ) -> None:
        """Use ``position_data``, which knows the kinds of data.

        Args:
            whole: A whole pass.
            position: Where the next pass begins; changed by whoever trains.
            fingerprints: What notes down the batches, or None.
            begin: Returns the rest of the pass that a position is in; None: batches are passed over
                one by one.
            again: Returns what yields the marks of the batches of an epoch, each time it is begun.
            replay: What must be read of passes that are over; None where a pass is a function of
                its epoch.
        """
        self.__dict__.update(whole.__dict__)
        self.is_checked = fingerprints is not None
        self.passes = 0
        self.was_read = False
        self._position = position
        self._fingerprints = fingerprints
        self._begin = begin
        self._again = again
        self._replay = replay
        self._over = 0
        self._to_compare: Past | None = None
        self._found: Past | None = None

    def __iter__(self) -> ShardIterator:
        """Begins a pass where the position is.

        Raises:
            CheckpointError: The pass has fewer batches than were trained on before.
        """
        self._catch_up()
        if self._fingerprints is not None:
            self._fingerprints.clear()
        self.passes += 1
        self.was_read = True
        if self._begin is not None:
            return ShardedDataset.__iter__(self._begin(self._position))
        iterator = super().__iter__()
        for done in range(self._position.step):
            if next(iterator.source, None) is None:
                raise CheckpointError(
                    f"The data has fewer batches than when the checkpoint was saved. Received: a "
                    f"pass of {done}, of which {self._position.step} were trained on. Give the "
                    "same data as then."
                )
        return iterator

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Refused: a loop inside a ``tf.function`` does not say how far it is."""
        raise CheckpointError(
            "A loop over the data of checkpoints inside a tf.function cannot be gone on with in "
            "its middle. Take iterator = iter(checkpoints.data) outside and call "
            "step.run(iterator, steps)."
        )

    def fingerprint(self, step: int) -> tuple[int, int] | None:
        """Returns marks of the first batch of the present pass and of the one before ``step``."""
        if self._fingerprints is None or not self.was_read or not step:
            return None
        return self._fingerprints.of(0), self._fingerprints.of(step - 1)

    def pass_over(self, epochs: int, compare: Past | None = None) -> None:
        """Takes note of passes that a run which is resumed began before.

        A dataset that is shuffled anew in each pass counts its passes: they are begun again before
        the next one is, and read as far as the order of the next depends on it.

        Args:
            epochs: How many.
            compare: What the last of them was, if ``found`` is to be compared with it.
        """
        self._over, self._to_compare, self._found = epochs, compare, None

    def found(self) -> Past | None:
        """Returns what the last of the passes that are over is now, if that was asked for."""
        self._catch_up()
        return self._found

    def _catch_up(self) -> None:
        epochs, self._over = self._over, 0
        compare, self._to_compare = self._to_compare, None
        if self._replay is None:
            if compare is not None:
                marks = self._again(epochs - 1)
                self._found = _read_pass(iter(marks), _length(marks), compare.batches, False)
            return
        while self.passes < epochs:
            marks = self._again(self.passes)
            self.passes += 1
            iterator = iter(marks)
            last = self.passes == epochs and compare is not None
            # The first pass of what Python makes is what it was, with all it does to its state.
            whole = self._replay.whole or (last and epochs == 1 and self._replay.python)
            if whole or last or self._replay.first:
                batches = compare.batches if compare is not None and last else 1
                found = _read_pass(iterator, _length(marks), batches, whole)
                self._found = found if last else None


def position_data(
    data: Any, strategy: tf.distribute.Strategy, position: Position
) -> PositionedDataset:
    """Returns data whose passes begin at a position.

    Args:
        data: What ``distribute_dataset`` takes, or returned; or a function of the epoch, a Python
            int, that returns what it takes.
        strategy: The strategy the shards are for.
        position: Where passes begin.

    Raises:
        DataError: The data is none of these.
    """
    if isinstance(data, ShardedDataset) and type(data) is not ShardedDataset:
        return PositionedDataset(data, position, None, None, lambda epoch: data, Replay())
    fingerprints = _Fingerprints()
    mark = tf.autograph.experimental.do_not_convert(lambda *batch: _mark(batch))
    cut = distribute_dataset
    replay: Replay | None = None
    if _takes_epoch(data):
        known: dict[int, tf.data.Dataset[Any]] = {}

        def noted(epoch: int) -> tf.data.Dataset[Any]:
            if epoch not in known:
                known.clear()
                known[epoch] = fingerprints.note(to_dataset(data(epoch)))
            return known[epoch]

        def again(epoch: int) -> Any:
            return to_dataset(data(epoch)).map(mark)
    else:
        if isinstance(data, ShardedDataset):
            batches, shares, prefetches = data.batches, data.shares, data.prefetches_to_device
            cut = functools.partial(
                distribute_dataset, shares=shares, prefetch_to_device=prefetches
            )
            strategy = data.strategy
        else:
            batches = to_dataset(data)
        replay = replay_of(batches)
        dataset = fingerprints.note(batches)

        def noted(epoch: int) -> tf.data.Dataset[Any]:
            return dataset

        def again(epoch: int) -> Any:
            return batches.map(mark)

    whole = cut(noted(position.epoch), strategy)

    def begin(position: Position) -> ShardedDataset:
        if position.step == 0 and replay is not None:
            return whole
        rest = noted(position.epoch).skip(position.step)
        return cut(rest, strategy)

    return PositionedDataset(whole, position, fingerprints, begin, again, replay)


def _takes_epoch(data: Any) -> bool:
    """Whether data is a function that needs one argument; without any it makes batches."""
    if not callable(data):
        return False
    try:
        parameters = inspect.signature(data).parameters.values()
    except ValueError:  # Some that are written in C.
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind in kinds]
    return len(needed) == 1


def _read_pass(marks: Iterator[Any], length: int, batches: int, whole: bool) -> Past:
    """Reads the first mark of a pass, or all; ``length`` is negative where it is not known."""
    first = last = None
    number = 0
    for mark in marks:
        number += 1
        first = int(mark) if number == 1 else first
        last = int(mark) if number == batches else last
        if not whole:
            return Past(batches if length < 0 else min(batches, length), first, last)
    return Past(min(number, batches), first, last)


def _length(marks: Any) -> int:
    return int(marks.cardinality())


class _Fingerprints:
    """Notes down a mark of each batch that a pass yields, by its number."""

    def __init__(self) -> None:
        # Unlike a variable, a table is the same inside the scope of a strategy and outside.
        self._table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, _NONE)

    def note(self, batches: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Returns the same batches, which are noted down when they are read."""

        def one(number: Any, batch: Any) -> Any:
            with tf.control_dependencies([self._table.insert(number, _mark(batch))]):
                return tf.nest.map_structure(
                    lambda leaf: None if leaf is None else tf.identity(leaf),
                    batch,
                    expand_composites=True,
                )

        return batches.enumerate().map(tf.autograph.experimental.do_not_convert(one))

    def of(self, number: int) -> int:
        return int(self._table.lookup(tf.constant(number, tf.int64)))

    def clear(self) -> None:
        self._table.remove(self._table.export()[0])


def _mark(batch: Any) -> Any:
    """A number that depends on some rows of each tensor, and on how many it has."""
    parts = []
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None:
            if leaf.shape.rank:
                apart = tf.maximum(tf.shape(leaf)[0] // _SAMPLED_ROWS, 1)
                parts.append(tf.io.serialize_tensor(tf.shape(leaf)))
                leaf = leaf[::apart]
            parts.append(tf.io.serialize_tensor(leaf))
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts), 2**62)
