"""Data that a run can go on with: passes begin where the run is, and are checked to be the same."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.passes import Replay, read_over, replay_of
from tfmultigpu.data.sharded_dataset import ShardedDataset, ShardIterator, distribute_dataset
from tfmultigpu.data.sources import to_dataset
from tfmultigpu.errors import CheckpointError

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
        passed_over: Called with the number of each epoch once its pass was passed over, for other
            data that was read in between.
    """

    def __init__(
        self,
        whole: ShardedDataset,
        position: Position,
        fingerprints: _Fingerprints | None,
        begin: Callable[[Position], ShardedDataset] | None,
        again: Callable[[int], Any] | None,
        replay: Replay | None,
    ) -> None:
        """Use ``position_data``, which knows the kinds of data.

        Args:
            whole: A whole pass.
            position: Where the next pass begins; changed by whoever trains.
            fingerprints: What notes down the batches, or None.
            begin: Where a pass is a function of its epoch: returns the rest of the pass that a
                position is in.
            again: Likewise: returns what yields the marks of the batches of an epoch.
            replay: Otherwise: what must be read of passes that are over.
        """
        self.__dict__.update(whole.__dict__)
        self.is_checked = fingerprints is not None
        self.passes = 0
        self.was_read = False
        self.passed_over: Callable[[int], None] = _nothing
        self._position = position
        self._fingerprints = fingerprints
        self._begin = begin
        self._again = again
        self._replay = replay
        self._broken_off: int | None = None
        self._over = 0
        self._to_compare: Past | None = None
        self._found: Past | None = None

    def __iter__(self) -> ShardIterator:
        """Begins a pass where the position is.

        Raises:
            CheckpointError: The pass has fewer batches than were trained on before; or its order is
                not known, because the one before was broken off.
        """
        if self._broken_off is not None:
            raise self._unknown_order(self._broken_off)
        self._catch_up()
        if self._fingerprints is not None:
            self._fingerprints.clear()
        self.passes += 1
        self.was_read = True
        if self._begin is not None:
            return ShardedDataset.__iter__(self._begin(self._position))
        iterator = super().__iter__()
        done = read_over(iterator.source, self._position.step)
        if done < self._position.step and self._fingerprints is None:  # Else marks will differ.
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

    def end_pass(self, batches: int) -> None:
        """Takes note of how far the pass was read that is over."""
        if self._replay is not None and self._replay.whole:
            broken_off = self._is_endless or batches < int(self._cardinality)
            self._broken_off = batches if broken_off else None

    def pass_over(self, epochs: int, compare: Past | None = None) -> None:
        """Takes note of passes that a run which is resumed began before.

        A dataset that is shuffled anew in each pass counts its passes: they are begun again before
        the next one is, and read as far as the order of the next depends on it.

        Args:
            epochs: How many.
            compare: What the last of them was, if ``found`` is to be compared with it.
        """
        self._over, self._to_compare, self._found = epochs, compare, None
        self._broken_off = None
        if epochs and (compare is not None or self._is_endless):
            self.end_pass(0 if compare is None else compare.batches)

    def found(self) -> Past | None:
        """Returns what the last of the passes that are over is now, if that was asked for.

        Raises:
            CheckpointError: It has no end, and the order of the next is not known.
        """
        if self._broken_off is not None and self._is_endless:
            raise self._unknown_order(self._broken_off)
        self._catch_up()
        return self._found

    def _catch_up(self) -> None:
        epochs, self._over = self._over, 0
        compare, self._to_compare = self._to_compare, None
        if self._replay is None:
            for epoch in range(epochs):
                self.passed_over(epoch)
            if compare is not None and self._again is not None:
                marks = self._again(epochs - 1)
                first = next((int(mark) for mark in marks), None)
                self._found = _shorter(compare.batches, int(marks.cardinality()), first)
            return
        while self.passes < epochs:
            self.passes += 1
            last = self.passes == epochs and compare is not None
            self._read_pass(self._replay, compare if last else None, alone=epochs == 1)
            self.passed_over(self.passes - 1)

    def _read_pass(self, replay: Replay, compare: Past | None, alone: bool) -> None:
        """Begins the next pass, and reads of it what it takes; notes it down for ``found``."""
        if self._fingerprints is not None:
            self._fingerprints.clear()
        batches = replay.batches
        if compare is not None and batches == 0:
            batches = 1
        if compare is not None and alone and replay.python:
            # The first pass of what Python makes is what it was, with all it does to its state.
            batches = None
        if batches is None and self._is_endless:
            batches = 0 if compare is None else compare.batches
        done = read_over(super().__iter__().source, batches)
        if compare is None or self._fingerprints is None:
            return
        first = self._fingerprints.of(0) if done else None
        if batches is None or batches >= compare.batches:
            read = min(done, compare.batches)
            last = self._fingerprints.of(read - 1) if read == compare.batches else None
            self._found = Past(read, first, last)
        else:
            self._found = _shorter(compare.batches, int(self._cardinality), first)

    def _unknown_order(self, batches: int) -> CheckpointError:
        whole = "without end" if self._is_endless else f"of {int(self._cardinality)} batches"
        read = f"{batches} batches of data {whole}" if batches else f"data {whole}"
        return CheckpointError(
            "An epoch ended before its pass over the data did, and what the next one begins with "
            "depends on how far tf.data had read ahead, so that two runs would differ. Received: "
            f"{read}, with a shuffle below repeat or cache, or a tf.random.Generator. Make the "
            "data a function of the epoch: data=lambda epoch: "
            "dataset.shuffle(n, seed=epoch).batch(size).repeat().take(steps)."
        )

    @property
    def _is_endless(self) -> bool:
        return bool(int(self._cardinality) == tf.data.INFINITE_CARDINALITY)


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
        return PositionedDataset(data, position, None, None, None, Replay())
    fingerprints = _Fingerprints()
    if not _takes_epoch(data):
        cut = distribute_dataset
        if isinstance(data, ShardedDataset):
            batches, shares, prefetches = data.batches, data.shares, data.prefetches_to_device
            cut = functools.partial(
                distribute_dataset, shares=shares, prefetch_to_device=prefetches
            )
            strategy = data.strategy
        else:
            batches = to_dataset(data)
        replay = replay_of(batches)
        whole = cut(fingerprints.note(batches), strategy)
        return PositionedDataset(whole, position, fingerprints, None, None, replay)
    mark = tf.autograph.experimental.do_not_convert(lambda *batch: _mark(batch))
    known: dict[int, tf.data.Dataset[Any]] = {}

    def noted(epoch: int) -> tf.data.Dataset[Any]:
        if epoch not in known:
            known.clear()
            known[epoch] = fingerprints.note(to_dataset(data(epoch)))
        return known[epoch]

    def again(epoch: int) -> Any:
        return to_dataset(data(epoch)).map(mark)

    def begin(position: Position) -> ShardedDataset:
        return distribute_dataset(noted(position.epoch).skip(position.step), strategy)

    whole = distribute_dataset(noted(position.epoch), strategy)
    return PositionedDataset(whole, position, fingerprints, begin, again, None)


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


def _nothing(epoch: int) -> None:
    """Of an epoch that was passed over nobody is told."""


def _shorter(batches: int, length: int, first: int | None) -> Past:
    """A pass of which the first batch was read; ``length`` is negative where it is not known."""
    return Past(batches if length < 0 else min(batches, length), first, None)


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
