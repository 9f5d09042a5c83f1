"""Datasets that resume at a position, with a check that the data is still the same."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import digest, with_dependencies
from tfmultigpu.data.passes import SharedNumber, begin_unread, read_over
from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.errors import CheckpointError

_NONE = -1


@dataclasses.dataclass(eq=False)
class Position:
    """Position of a run in its data: complete passes, and batches of the current pass."""

    epoch: int = 0
    step_in_epoch: int = 0


class PositionedDataset(ShardedDataset):
    """Sharded dataset whose passes begin at a position; ``position_data`` makes it.

    Attributes:
        passes: Number of passes begun so far, those passed over included.
        is_begun: Whether a pass has begun that trains; the training loop resets it with an epoch.
        passed_over: Called with the number of each epoch whose pass was passed over, for other data
            that was read in between.
    """

    def __init__(
        self,
        whole: ShardedDataset,
        position: Position,
        first_batch: SharedNumber | None = None,
        of_epoch: Callable[[int], ShardedDataset] | None = None,
    ) -> None:
        """Begins as a whole pass; the training loop changes ``position``.

        ``first_batch`` records the first batch of each pass; ``of_epoch`` makes the data of one.
        """
        self.__dict__.update(whole.__dict__)
        self.passes = 0
        self.passed_over: Callable[[int], None] = lambda epoch: None
        self._position, self._first_batch, self._of_epoch = position, first_batch, of_epoch
        self.pass_over(0)

    def __iter__(self) -> ShardIterator:
        """Begins a pass at the position."""
        self._catch_up()
        whole = self if self._of_epoch is None else self._of_epoch(self._position.epoch)
        self.reader = whole.reader
        self._count_pass()
        self.is_begun = True
        iterator, done = ShardedDataset.iterate_from(whole, self._position.step_in_epoch)
        if done < self._position.step_in_epoch:
            raise CheckpointError(
                "The data has fewer batches than when the checkpoint was saved.",
                f"a pass of {done} batches, after {self._position.step_in_epoch} were trained on",
                "Give the data of that time.",
            )
        return iterator

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Raises an error: a loop inside a ``tf.function`` does not report its position."""
        raise CheckpointError(
            "A loop over checkpointed data inside a tf.function cannot resume in the middle of a "
            "pass.",
            "",
            "Write iterator = iter(checkpoints.data) outside the tf.function and call "
            "step.run(iterator, steps).",
        )

    def first_hash(self) -> int | None:
        """Returns a hash of the first batch of the last pass; None if it was not read."""
        number = _NONE if self._first_batch is None else int(self._first_batch.read())
        return None if number == _NONE else number

    def pass_over(self, epochs: int, compare: bool = False) -> None:
        """Has the passes of earlier epochs begin again before the next, which a shuffle counts.

        With ``compare`` the first batch of the last of them is read for ``hash_of_last_epoch``.
        """
        self._passes_to_repeat, self._compares = epochs, compare
        self._last_hash: int | None = None
        self.is_begun = False

    def hash_of_last_epoch(self) -> int | None:
        """Returns a hash of the first batch of the last epoch to pass over, as the data is now."""
        self._catch_up()
        return self._last_hash

    def _catch_up(self) -> None:
        epochs, self._passes_to_repeat = self._passes_to_repeat, 0
        compares, self._compares = self._compares, False
        for epoch in range(self.passes if self._of_epoch is None else 0, epochs):
            is_compared = compares and epoch == epochs - 1
            self._count_pass()
            if self._of_epoch is None or is_compared:
                whole = self if self._of_epoch is None else self._of_epoch(epoch)
                read_over(ShardedDataset.__iter__(whole).source, int(is_compared))
            self.passed_over(epoch)
        if compares:
            self._last_hash = self.first_hash()

    def _count_pass(self) -> None:
        self.passes += 1
        if self._first_batch is not None:
            self._first_batch.write(_NONE)


def position_data(
    data: Any, strategy: tf.distribute.Strategy, position: Position, *, is_compared: bool = True
) -> PositionedDataset:
    """Returns data, or a function of the epoch that returns data, as passes from a position on.

    If it is compared, the first batch of a pass is recorded for ``first_hash``.
    """
    if isinstance(data, ShardedDataset) and type(data) is not ShardedDataset:
        return PositionedDataset(data, position)
    first_batch = SharedNumber()
    if _takes_epoch(data):
        known: dict[int, ShardedDataset] = {}

        def of_epoch(epoch: int) -> ShardedDataset:
            if epoch not in known:
                known.clear()
                whole = distribute_dataset(data(epoch), strategy)
                known[epoch] = whole.with_batches(_record_first(whole.batches, first_batch))
            return known[epoch]

        return PositionedDataset(of_epoch(position.epoch), position, first_batch, of_epoch)
    is_distributed = isinstance(data, ShardedDataset)
    whole = data if is_distributed else distribute_dataset(data, strategy)
    if not begin_unread(whole.batches):
        raise CheckpointError(
            "The order of a pass depends on how far tf.data had read the passes before it, so a "
            "resumed run would read other batches.",
            "data with a shuffle below cache(), repeat(), concatenate() or another shuffle, or "
            "with a tf.random.Generator",
            "Make it a function of the epoch: data=lambda epoch: dataset.shuffle(n, "
            "seed=epoch).batch(size).",
        )
    if not is_compared:
        return PositionedDataset(whole, position)
    recorded = whole.with_batches(_record_first(whole.batches, first_batch))
    return PositionedDataset(recorded, position, first_batch)


def _takes_epoch(data: Any) -> bool:
    """Returns whether data is a function that needs one argument, the epoch."""
    try:
        signature = inspect.signature(data)
        signature.bind(0)
    except (TypeError, ValueError):  # Not a function, of another signature, or written in C.
        return False
    needed = [one for one in signature.parameters.values() if one.default is one.empty]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.VAR_POSITIONAL


def _record_first(batches: tf.data.Dataset[Any], first: SharedNumber) -> tf.data.Dataset[Any]:
    """Returns the same batches; a hash of the first is stored when it is read."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def record(number: Any, batch: Any) -> Any:
        stored = tf.cond(number == 0, lambda: tf.group(first.write(digest(batch))), tf.no_op)
        return with_dependencies([stored], batch)

    return batches.enumerate().map(record)
