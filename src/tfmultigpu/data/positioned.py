"""Datasets that resume at a position, with a check that the data is still the same."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import with_dependencies
from tfmultigpu.data.passes import begin_unread, read_over, runs_python
from tfmultigpu.data.sharded_dataset import ShardedDataset, ShardIterator, distribute_dataset
from tfmultigpu.data.sources import to_dataset
from tfmultigpu.errors import CheckpointError

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


class PositionedDataset(ShardedDataset):
    """Sharded dataset whose passes begin at a position; ``position_data`` makes it.

    Attributes:
        passes: Number of passes begun so far, those passed over included.
        was_read: Whether this process has begun a pass.
        passed_over: Called with the number of each epoch whose pass was passed over, for other data
            that was read in between.
    """

    def __init__(
        self,
        whole: ShardedDataset,
        position: Position,
        first_batch: _FirstBatch | None = None,
        of_epoch: Callable[[int], ShardedDataset] | None = None,
    ) -> None:
        """Takes a whole pass; the training loop changes ``position``.

        ``first_batch`` records the first batch of each pass, and ``of_epoch`` returns the data of
        an epoch, if a pass is a function of its epoch.
        """
        self.__dict__.update(whole.__dict__)
        self.passes = 0
        self.was_read = False
        self.passed_over: Callable[[int], None] = lambda epoch: None
        self._position, self._first_batch, self._of_epoch = position, first_batch, of_epoch
        finite = self.cardinality() != tf.data.INFINITE_CARDINALITY
        self._runs_python = of_epoch is None and finite and runs_python(whole.batches)
        self._passes_to_repeat, self._compares = 0, False
        self._last_hash: int | None = None

    def __iter__(self) -> ShardIterator:
        """Begins a pass at the position."""
        self._catch_up()
        whole = self if self._of_epoch is None else self._of_epoch(self._position.epoch)
        self._begin_pass()
        self.was_read = True
        iterator, done = ShardedDataset.iterate_from(whole, self._position.step)
        if done < self._position.step:
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

    def first_hash(self) -> int | None:
        """Returns a hash of the first batch of the last pass; None if it was not read."""
        return None if self._first_batch is None else self._first_batch.hash()

    def pass_over(self, epochs: int, compare: bool = False) -> None:
        """Has the passes of earlier epochs begin again before the next pass.

        A dataset that reshuffles each pass counts its passes, whether they are read or not. With
        ``compare`` the first batch of the last of them is read for ``hash_of_last_epoch``.
        """
        self._passes_to_repeat, self._compares, self._last_hash = epochs, compare, None

    def hash_of_last_epoch(self) -> int | None:
        """Returns a hash of the first batch of the last epoch to pass over, as the data is now."""
        self._catch_up()
        return self._last_hash

    def _catch_up(self) -> None:
        epochs, self._passes_to_repeat = self._passes_to_repeat, 0
        compares, self._compares = self._compares, False
        for epoch in range(self.passes if self._of_epoch is None else 0, epochs):
            is_compared = compares and epoch == epochs - 1
            self._begin_pass()
            if self._of_epoch is None or is_compared:
                whole = self if self._of_epoch is None else self._of_epoch(epoch)
                # A first pass, read to its end, brings the state of Python code to where it was.
                # After more passes, code with a state shows in the hash.
                to_end = is_compared and epoch == 0 and self._runs_python
                batches = None if to_end else int(is_compared)
                read_over(ShardedDataset.__iter__(whole).source, batches)
            self.passed_over(epoch)
        if compares:
            self._last_hash = self.first_hash()

    def _begin_pass(self) -> None:
        self.passes += 1
        if self._first_batch is not None:
            self._first_batch.clear()


def position_data(
    data: Any, strategy: tf.distribute.Strategy, position: Position, *, is_compared: bool = True
) -> PositionedDataset:
    """Returns data whose passes begin at a position.

    The data is what ``distribute_dataset`` takes or returns, or a function of the epoch that
    returns such data. If it is compared, the first batch of a pass is recorded for ``first_hash``.
    """
    if isinstance(data, ShardedDataset) and type(data) is not ShardedDataset:
        return PositionedDataset(data, position)
    first_batch = _FirstBatch()
    if _takes_epoch(data):
        known: dict[int, ShardedDataset] = {}

        def of_epoch(epoch: int) -> ShardedDataset:
            if epoch not in known:
                known.clear()
                batches = first_batch.record(to_dataset(data(epoch)))
                known[epoch] = distribute_dataset(batches, strategy)
            return known[epoch]

        return PositionedDataset(of_epoch(position.epoch), position, first_batch, of_epoch)
    batches = data.batches if isinstance(data, ShardedDataset) else to_dataset(data)
    if not begin_unread(batches):
        raise CheckpointError(
            "The order of a pass depends on how far tf.data had read the passes before it, so a "
            "resumed run would read other batches. Received: data with a shuffle below cache(), "
            "repeat(), concatenate() or another shuffle, or with a tf.random.Generator. Make it a "
            "function of the epoch: data=lambda epoch: dataset.shuffle(n, seed=epoch).batch(size)."
        )
    recorded = first_batch.record(batches) if is_compared else batches
    is_distributed = isinstance(data, ShardedDataset)
    whole = (
        data.with_batches(recorded) if is_distributed else distribute_dataset(recorded, strategy)
    )
    return PositionedDataset(whole, position, first_batch if is_compared else None)


def _takes_epoch(data: Any) -> bool:
    """Returns whether data is a function that needs one argument, the epoch."""
    try:
        signature = inspect.signature(data)
        signature.bind(0)
    except (TypeError, ValueError):  # Not a function, of another signature, or written in C.
        return False
    needed = [one for one in signature.parameters.values() if one.default is one.empty]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.VAR_POSITIONAL


class _FirstBatch:
    """Hash of the first batch that a pass yields."""

    def __init__(self) -> None:
        # Unlike a variable, a table is the same object inside and outside the scope of a strategy.
        self._table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, _NONE)

    def record(self, batches: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Returns the same batches; the first is recorded when it is read."""

        def record_first(number: Any, batch: Any) -> Any:
            def insert() -> Any:
                return tf.group(self._table.insert(number, _hash_of(batch)))

            return with_dependencies([tf.cond(number == 0, insert, tf.no_op)], batch)

        return batches.enumerate().map(tf.autograph.experimental.do_not_convert(record_first))

    def hash(self) -> int | None:
        found = int(self._table.lookup(tf.constant(0, tf.int64)))
        return None if found == _NONE else found

    def clear(self) -> None:
        self._table.remove(tf.constant([0], tf.int64))


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
