"""Datasets that resume at a position, with a check that the data is still the same."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import with_dependencies
from tfmultigpu.data.passes import Replay, read_over, replay_of
from tfmultigpu.data.sharded_dataset import ShardedDataset, ShardIterator, distribute_dataset
from tfmultigpu.data.sources import to_dataset
from tfmultigpu.errors import CheckpointError

__all__ = ["Past", "Position", "PositionedDataset", "position_data"]

_SAMPLED_ROWS = 4
_NONE = -1


@dataclasses.dataclass
class Position:
    """Position of a run in its data.

    Attributes:
        epoch: Complete passes so far.
        step: Batches of the current pass so far.
    """

    epoch: int = 0
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Past:
    """Record of a finished pass.

    Attributes:
        batches: Number of batches that were trained on.
        first: Hash of the first batch.
        last: Hash of the last of these batches; None if it was not read.
    """

    batches: int
    first: int | None
    last: int | None


class PositionedDataset(ShardedDataset):
    """Sharded dataset whose passes begin at a position.

    Attributes:
        passes: Number of passes begun so far, those passed over included.
        was_read: Whether this process has begun a pass.
        is_checked: Whether fingerprints of the batches are recorded.
        passed_over: Called with the number of each epoch whose pass was passed over, for other data
            that was read in between.
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
        """Use ``position_data`` instead.

        Args:
            whole: A whole pass.
            position: The position at which the next pass begins; the training loop changes it.
            fingerprints: Records the batches, or None.
            begin: If a pass is a function of its epoch: returns the rest of the pass at a position.
            again: In that case: returns a dataset of the hashes of an epoch's batches.
            replay: Otherwise: the batches of earlier passes to read again.
        """
        self.__dict__.update(whole.__dict__)
        self.is_checked = fingerprints is not None
        self.passes = 0
        self.was_read = False
        self.passed_over: Callable[[int], None] = _ignore_epoch
        self._position = position
        self._fingerprints = fingerprints
        self._begin = begin
        self._again = again
        self._replay = replay
        self._ended_early_after: int | None = None
        self._passes_to_repeat = 0
        self._to_compare: Past | None = None
        self._found: Past | None = None

    def __iter__(self) -> ShardIterator:
        """Begins a pass at the position.

        Raises:
            CheckpointError: The pass has fewer batches than were trained on before; or its order is
                unknown, because the previous pass ended early.
        """
        if self._ended_early_after is not None:
            raise self._unknown_order(self._ended_early_after)
        self._catch_up()
        if self._fingerprints is not None:
            self._fingerprints.clear()
        self.passes += 1
        self.was_read = True
        if self._begin is not None:
            return ShardedDataset.__iter__(self._begin(self._position))
        iterator, done = self.iterate_from(self._position.step)
        # With fingerprints, checkpoints find the difference themselves.
        if done < self._position.step and self._fingerprints is None:
            raise CheckpointError(
                "The data has fewer batches than when the checkpoint was saved. Received: a pass "
                f"of {done} batches, after {self._position.step} were trained on. Give the data of "
                "that time."
            )
        return iterator

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Raises an error: a loop inside a ``tf.function`` does not report its position."""
        raise CheckpointError(
            "A loop over checkpointed data inside a tf.function cannot resume in the middle of a "
            "pass. Write iterator = iter(checkpoints.data) outside the tf.function and call "
            "step.run(iterator, steps)."
        )

    def fingerprint(self, step: int) -> tuple[int, int] | None:
        """Returns hashes of the first batch of the current pass and of the one before ``step``."""
        if self._fingerprints is None or not self.was_read or not step:
            return None
        return self._fingerprints.of(0), self._fingerprints.of(step - 1)

    def end_pass(self, batches: int) -> None:
        """Records how many batches the finished pass read."""
        if self._replay is not None and self._replay.whole:
            ended_early = self._is_endless or batches < int(self._cardinality)
            self._ended_early_after = batches if ended_early else None

    def pass_over(self, epochs: int, compare: Past | None = None) -> None:
        """Records passes that a run began before it was resumed.

        A dataset that reshuffles each pass counts its passes. So before the next pass begins, these
        passes begin again and are read as far as the order of the next depends on them.

        Args:
            epochs: Number of passes.
            compare: Record of the last of them, if the caller compares it with ``found``.
        """
        self._passes_to_repeat, self._to_compare, self._found = epochs, compare, None
        self._ended_early_after = None
        if epochs and (compare is not None or self._is_endless):
            self.end_pass(0 if compare is None else compare.batches)

    def found(self) -> Past | None:
        """Returns the record of the last earlier pass as the data is now, if requested.

        Raises:
            CheckpointError: The pass has no end, and the order of the next is unknown.
        """
        if self._ended_early_after is not None and self._is_endless:
            raise self._unknown_order(self._ended_early_after)
        self._catch_up()
        return self._found

    def _catch_up(self) -> None:
        epochs, self._passes_to_repeat = self._passes_to_repeat, 0
        compare, self._to_compare = self._to_compare, None
        if self._replay is None:
            for epoch in range(epochs):
                self.passed_over(epoch)
            if compare is not None and self._again is not None:
                hashes = self._again(epochs - 1)
                first = next((int(one) for one in hashes), None)
                self._found = _record_of_first(compare.batches, int(hashes.cardinality()), first)
            return
        while self.passes < epochs:
            self.passes += 1
            last = self.passes == epochs and compare is not None
            self._read_pass(self._replay, compare if last else None, alone=epochs == 1)
            self.passed_over(self.passes - 1)

    def _read_pass(self, replay: Replay, compare: Past | None, alone: bool) -> None:
        """Reads the next pass as far as needed, and records it for ``found``."""
        if self._fingerprints is not None:
            self._fingerprints.clear()
        batches = replay.batches
        if compare is not None and batches == 0:
            batches = 1
        if compare is not None and alone and replay.python:
            # A first pass, read to its end, brings the state of Python code to where it was.
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
            self._found = _record_of_first(compare.batches, int(self._cardinality), first)

    def _unknown_order(self, batches: int) -> CheckpointError:
        whole = "without end" if self._is_endless else f"of {int(self._cardinality)} batches"
        read = f"{batches} batches of data {whole}" if batches else f"data {whole}"
        return CheckpointError(
            "An epoch ended before its pass over the data. The next epoch then depends on how far "
            f"tf.data had read ahead, so two runs would differ. Received: {read}, with a shuffle "
            "below repeat or cache, or a tf.random.Generator. Make the data a function of the "
            "epoch: data=lambda epoch: dataset.shuffle(n, "
            "seed=epoch).batch(size).repeat().take(steps)."
        )

    @property
    def _is_endless(self) -> bool:
        return bool(int(self._cardinality) == tf.data.INFINITE_CARDINALITY)


def position_data(
    data: Any, strategy: tf.distribute.Strategy, position: Position
) -> PositionedDataset:
    """Returns data whose passes begin at a position.

    Args:
        data: Anything that ``distribute_dataset`` accepts, or its result; or a function of the
            epoch, a Python int, that returns such data.
        strategy: The strategy the shards are for.
        position: The position at which passes begin.

    Raises:
        DataError: The data is none of these.
    """
    if isinstance(data, ShardedDataset) and type(data) is not ShardedDataset:
        return PositionedDataset(data, position, None, None, None, Replay())
    fingerprints = _Fingerprints()
    if not _takes_epoch(data):
        if isinstance(data, ShardedDataset):
            batches = data.batches
            whole = data.with_batches(fingerprints.record(batches))
        else:
            batches = to_dataset(data)
            whole = distribute_dataset(fingerprints.record(batches), strategy)
        return PositionedDataset(whole, position, fingerprints, None, None, replay_of(batches))
    to_hash = tf.autograph.experimental.do_not_convert(lambda *batch: _hash_of(batch))
    known: dict[int, tf.data.Dataset[Any]] = {}

    def recorded(epoch: int) -> tf.data.Dataset[Any]:
        if epoch not in known:
            known.clear()
            known[epoch] = fingerprints.record(to_dataset(data(epoch)))
        return known[epoch]

    def again(epoch: int) -> Any:
        return to_dataset(data(epoch)).map(to_hash)

    def begin(position: Position) -> ShardedDataset:
        return distribute_dataset(recorded(position.epoch).skip(position.step), strategy)

    whole = distribute_dataset(recorded(position.epoch), strategy)
    return PositionedDataset(whole, position, fingerprints, begin, again, None)


def _takes_epoch(data: Any) -> bool:
    """Returns whether data is a function that needs one argument, the epoch."""
    if not callable(data):
        return False
    try:
        parameters = inspect.signature(data).parameters.values()
    except ValueError:  # Some functions written in C have no signature.
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [one for one in parameters if one.default is one.empty and one.kind in kinds]
    return len(needed) == 1


def _ignore_epoch(epoch: int) -> None:
    """Ignores an epoch that was passed over."""


def _record_of_first(batches: int, length: int, first: int | None) -> Past:
    """Returns the record of a pass of which only the first batch was read; length < 0: unknown."""
    return Past(batches if length < 0 else min(batches, length), first, None)


class _Fingerprints:
    """Hashes of the batches that a pass yields, by number."""

    def __init__(self) -> None:
        # Unlike a variable, a table is the same object inside and outside the scope of a strategy.
        self._table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, _NONE)

    def record(self, batches: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Returns the same batches, recorded as they are read."""

        def record_one(number: Any, batch: Any) -> Any:
            return with_dependencies([self._table.insert(number, _hash_of(batch))], batch)

        return batches.enumerate().map(tf.autograph.experimental.do_not_convert(record_one))

    def of(self, number: int) -> int:
        return int(self._table.lookup(tf.constant(number, tf.int64)))

    def clear(self) -> None:
        self._table.remove(self._table.export()[0])


def _hash_of(batch: Any) -> Any:
    """Returns a hash of the shape and some rows of each tensor."""
    parts = []
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if leaf is not None:
            if leaf.shape.rank:
                stride = tf.maximum(tf.shape(leaf)[0] // _SAMPLED_ROWS, 1)
                parts.append(tf.io.serialize_tensor(tf.shape(leaf)))
                leaf = leaf[::stride]
            parts.append(tf.io.serialize_tensor(leaf))
    return tf.strings.to_hash_bucket_fast(tf.strings.join(parts), 2**62)
