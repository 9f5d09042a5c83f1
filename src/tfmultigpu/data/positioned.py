"""Datasets that resume at a position, with a check that the data is still the same.

Two add-ons call it: checkpoints hold such a dataset, and ``fit`` makes one of data that it resumes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmultigpu.data.batch_format import digest, with_dependencies
from tfmultigpu.data.passes import (
    SharedNumber,
    begin_unread,
    graph_of,
    read_over,
    shuffles_without_seed,
)
from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.data.sharded_dataset import ShardedDataset, distribute_dataset
from tfmultigpu.errors import CheckpointError
from tfmultigpu.types import Batches, Function, Nested, Scalar, Shard
from tfmultigpu.user_code import warn

_NONE = -1


@dataclasses.dataclass(eq=False)
class Position:
    """Position of a run in its data.

    Attributes:
        epoch: Complete passes.
        step_in_epoch: Batches of the current pass.
        is_begun: Whether the pass of this epoch has begun here.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    is_begun: bool = False

    def move_to(self, epoch: int, step_in_epoch: int = 0) -> None:
        """Moves to a place whose pass has not begun here."""
        self.epoch, self.step_in_epoch, self.is_begun = epoch, step_in_epoch, False

    def end_epoch(self) -> None:
        """Moves to the begin of the next pass."""
        self.move_to(self.epoch + 1)

    def begin_pass(self) -> None:
        """Notes that the pass of this epoch begins."""
        self.is_begun = True

    def count(self, steps: int) -> None:
        """Counts batches of the current pass."""
        self.step_in_epoch += steps


class PositionedDataset(ShardedDataset):
    """Sharded dataset whose passes begin at a position; ``position_data`` makes it.

    Attributes:
        passes: Number of passes begun so far, those passed over included.
    """

    def __init__(
        self,
        like: ShardedDataset,
        position: Position,
        first_batch: SharedNumber | None = None,
        of_epoch: Callable[[int], ShardedDataset] | None = None,
    ) -> None:
        """Use ``position_data`` instead.

        Args:
            like: A whole pass.
            position: Where a pass begins; who owns it moves it on.
            first_batch: Records the first batch of each pass.
            of_epoch: Returns the data of an epoch.
        """
        batches = like.batches
        if first_batch is not None and of_epoch is None:
            batches = _record_first(batches, first_batch)
        super().__init__(
            batches,
            like.strategy,
            like.shares,
            like.prefetches_to_device,
            like.preprocessing,
            copies=like.cut.copies,
            reader=like.reader,
        )
        self.passes = 0
        self._position, self._first_batch, self._of_epoch = position, first_batch, of_epoch
        self._notify: Callable[[int], None] = lambda epoch: None
        self._resumed: Callable[[], None] = lambda: None
        self.pass_over(0)

    def __iter__(self) -> ShardIterator:
        """Begins a pass at the position."""
        self._catch_up()
        whole: ShardedDataset = self
        if self._of_epoch is not None:
            whole = self._of_epoch(self._position.epoch)
        self.reader = whole.reader
        self._count_pass()
        self._position.begin_pass()
        iterator, done = ShardedDataset.iterate_from(whole, self._position.step_in_epoch)
        if done < self._position.step_in_epoch:
            raise CheckpointError(
                "The data has fewer batches than when the checkpoint was saved.",
                f"a pass of {done} batches, after {self._position.step_in_epoch} were trained on",
                "Give the data of that time.",
            )
        if done:
            self._resumed()
        return iterator

    def reduce(self, initial_state: Nested, reduce_func: Function) -> Nested:
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
        if self._first_batch is None:
            return None
        number = int(self._first_batch.read())
        return None if number == _NONE else number

    def pass_over(self, epochs: int, compare: bool = False) -> None:
        """Has the passes of earlier epochs begin again before the next, which a shuffle counts.

        With ``compare`` the first batch of the last of them is read for ``hash_of_last_epoch``.
        """
        self._passes_to_repeat, self._compares = epochs, compare
        self._last_hash: int | None = None

    def call_after_passing_over(self, notify: Callable[[int], None]) -> None:
        """Has a function called with each epoch that was passed over.

        It passes over other data, which was read between the passes of this one.
        """
        self._notify = notify

    def call_when_resumed(self, resumed: Callable[[], None]) -> None:
        """Has a function called when a pass has begun behind its first batch."""
        self._resumed = resumed

    def hash_of_last_epoch(self) -> int | None:
        """Returns a hash of the first batch of the last epoch to pass over, as the data is now."""
        self._catch_up()
        return self._last_hash

    def _catch_up(self) -> None:
        epochs, self._passes_to_repeat = self._passes_to_repeat, 0
        compares, self._compares = self._compares, False
        # Passes of one dataset are counted; a function of the epoch is called for each.
        first = self.passes if self._of_epoch is None else 0
        for epoch in range(first, epochs):
            is_compared = compares and epoch == epochs - 1
            self._count_pass()
            if self._of_epoch is None:
                read_over(ShardedDataset.__iter__(self).source, int(is_compared))
            elif is_compared:
                read_over(iter(self._of_epoch(epoch)).source, 1)
            self._notify(epoch)
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
    if isinstance(data, PositionedDataset):
        return PositionedDataset(data, position)
    first_batch = SharedNumber()
    if _takes_epoch(data):
        made: dict[int, ShardedDataset] = {}  # The last one.

        def of_epoch(epoch: int) -> ShardedDataset:
            if epoch not in made:
                made.clear()
                whole = distribute_dataset(data(epoch), strategy)
                made[epoch] = whole.with_batches(_record_first(whole.batches, first_batch))
            return made[epoch]

        data_of_epoch = of_epoch(position.epoch)
        _warn_of_order(graph_of(data_of_epoch.batches))
        return PositionedDataset(data_of_epoch, position, first_batch, of_epoch)
    is_distributed = isinstance(data, ShardedDataset)
    whole = data if is_distributed else distribute_dataset(data, strategy)
    graph = graph_of(whole.batches)
    if not begin_unread(graph):
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
    _warn_of_order(graph)
    return PositionedDataset(whole, position, first_batch)


def _warn_of_order(graph: Any) -> None:
    count = shuffles_without_seed(graph)
    if count:
        warn(
            "The checkpointed data has an order that ends with this process: a restarted run would "
            f"read other batches, and is refused. Received: {count} shuffle(s) without a seed. "
            "Write dataset.shuffle(n, seed=1), or keras.utils.set_random_seed(1) before the data."
        )


def _takes_epoch(data: Any) -> bool:
    """Returns whether data is a function that needs one argument, the epoch."""
    try:
        signature = inspect.signature(data)
        signature.bind(0)
    except (TypeError, ValueError):  # Not a function, of another signature, or written in C.
        return False
    needed = [one for one in signature.parameters.values() if one.default is one.empty]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.VAR_POSITIONAL


def _record_first(batches: Batches, first: SharedNumber) -> Batches:
    """Returns the same batches; a hash of the first is stored when it is read."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def record(number: Scalar, batch: Shard) -> Shard:
        stored = tf.cond(number == 0, lambda: tf.group(first.write(digest(batch))), tf.no_op)
        return with_dependencies([stored], batch)

    return batches.enumerate().map(record)
