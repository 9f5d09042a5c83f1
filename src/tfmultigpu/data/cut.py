"""The cut of a global batch into shards, and how shards cross from ``tf.data`` to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import checked_rows, count_rows, structure_of, tensors_of
from tfmultigpu.data.small_batches import each_row_once
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.attached import attached
from tfmultigpu.strategies.topology import local_replicas, per_replica, strategy_devices
from tfmultigpu.types import Batches, Nested, Shard, Tensor

_KEPT = 32  # Functions that cut: shares may be planned anew each epoch.


class Cut:
    """Cuts batches in ``tf.data``, and makes batches of what ``tf.data`` yields.

    An element is a flat tuple, because ``tf.data`` packs nested structures in Python at each read:
    the tensors of each local shard in turn, then the offsets of all shards. Prefetched to devices,
    each replica's element holds only its own shard. With one replica and dense tensors an element
    is the global batch itself: mapping a function over the data would cost more than a small step.

    Cuts are equal if they read elements alike: one trace of a ``tf.function`` serves all datasets
    of a type, whatever the shares. If the number of rows is known, a trace holds the offsets, and
    serves datasets of equal shares.

    Attributes:
        strategy: The strategy the shards are for.
        shares: Relative share of each replica, integers.
        element_spec: The type specs of a global batch.
        on_devices: Whether elements are per-replica values, copied ahead of time.
        copies: Whether batches of fewer rows than replicas are given to users as copies.
        local: Numbers of this process's replicas, among all replicas.
        is_needed: Whether elements differ from global batches.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        shares: tuple[int, ...],
        element_spec: Any,
        on_devices: bool = False,
        copies: bool = False,
    ) -> None:
        self.strategy, self.shares, self.element_spec = strategy, shares, element_spec
        self.on_devices, self.copies = on_devices, copies
        self.local = local_replicas(strategy)
        alone = strategy.num_replicas_in_sync == 1 and not on_devices
        self.is_needed = not alone or not all(
            isinstance(spec, tf.TensorSpec) and spec.shape.rank
            for spec in components_of(element_spec)
        )
        self._pack = _packer(element_spec)
        self._fixed = self._fixed_offsets()

    def __eq__(self, other: object) -> bool:
        """Compares all that a trace takes in: strategies, type specs, places, known offsets."""
        return (
            isinstance(other, Cut)
            and self.strategy is other.strategy
            and (self.on_devices, self.copies) == (other.on_devices, other.copies)
            and self._fixed == other._fixed
            and bool(self.element_spec == other.element_spec)
            and structure_of(self.element_spec) == structure_of(other.element_spec)
        )

    def __hash__(self) -> int:
        """Leaves out the type specs: the specs of a dict have no hash."""
        return hash((id(self.strategy), self.on_devices))

    @property
    def function(self) -> Nested:
        """The function that cuts a global batch into an element, whose rows it checks.

        The strategy keeps the last ones: to trace it takes longer than a short epoch.
        """

        def cut(*element: Tensor) -> tuple[Tensor, ...]:
            # tf.data unpacks only tuples into arguments.
            batch = element if type(self.element_spec) is tuple else element[0]
            return self.cut(checked_rows(batch))

        kept, key = attached(self.strategy).cuts, (self, self.shares)
        function: Any = kept.pop(key, None) or tf.function(cut, autograph=False)
        if len(kept) >= _KEPT:
            kept.pop(next(iter(kept)), None)  # Another thread may have let it go.
        kept[key] = function
        return function

    def cut(self, batch: Shard) -> tuple[Tensor, ...]:
        """Cuts a global batch, whose tensors have equally many rows, into an element."""
        offsets = partition.shard_offsets(count_rows(batch), self.shares)
        return self.flatten(partition.cut_rows(batch, offsets, self.local), offsets)

    def flatten(self, shards: list[Shard], offsets: Tensor) -> tuple[Tensor, ...]:
        """Returns the element that holds the local shards and the offsets of all shards."""
        return (*tensors_of(shards), offsets)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def deal(self, *element: Tensor) -> Batches:
        """Returns one element per local replica, each with its own shard, in turn."""
        *leaves, offsets = element
        first, *others = self._by_replica(leaves)
        dealt = tf.data.Dataset.from_tensors((*first, offsets))
        for shard in others:
            dealt = dealt.concatenate(tf.data.Dataset.from_tensors((*shard, offsets)))
        return dealt

    def split(self, element: Tensor) -> tuple[list[Shard], Tensor]:
        """Returns the local shards, one structure each, and the offsets of all shards."""
        if not self.is_needed:
            element = checked_rows(element)
            return [element], partition.shard_offsets(count_rows(element), (1,))
        *leaves, offsets = element
        if self.on_devices:
            results = self.strategy.experimental_local_results
            shards = zip(*map(results, leaves), strict=True)
            return list(map(self._pack, map(iter, shards))), self._known(results(offsets)[0])
        return list(map(self._pack, map(iter, self._by_replica(leaves)))), self._known(offsets)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def to_batch(self, element: Tensor) -> Shard:
        """Returns a structure of per-replica values for ``strategy.run``, marked with its offsets.

        One replica gets plain tensors.
        """
        if not self.is_needed:
            batch = partition.mark_offsets(checked_rows(element))
            partition.mark_fixed(tensors_of(batch)[0], self._fixed)
            return batch
        *leaves, offsets = element
        if self.strategy.num_replicas_in_sync == 1:
            return partition.mark_offsets(self._pack(iter(leaves)))
        first = self.strategy.experimental_local_results(leaves[0])[0]
        partition.mark_fixed(first, self._fixed)
        if self.on_devices:
            offsets = self._known(self.strategy.experimental_local_results(offsets)[0])
            devices = strategy_devices(self.strategy)
        else:
            offsets = self._known(offsets)
            leaves = per_replica(self.strategy, self._by_replica(leaves))
            devices = ("CPU:0",) * len(self.local)
        batch = self._pack(iter(leaves))
        if self.copies:
            return partition.mark_offsets(batch, offsets)
        return each_row_once(batch, offsets, self.strategy, devices)

    def _fixed_offsets(self) -> tuple[int, ...] | None:
        """Returns the offsets of all batches, if the type specs tell their number of rows."""
        rows: set[int | None] = set()
        for spec in components_of(self.element_spec):
            is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank
            rows.add(spec.shape[0] if is_dense else None)
        if len(rows) != 1 or (known := rows.pop()) is None or known < 1:
            return None
        with tf.init_scope(), tf.device("CPU:0"):
            return tuple(partition.shard_offsets(tf.constant(known), self.shares).numpy().tolist())

    def _known(self, offsets: Tensor) -> Tensor:
        """Returns, in a graph, the offsets as a constant if they are the same for all batches."""
        if self._fixed is None or not tf.inside_function():
            return offsets
        with tf.device("CPU:0"):
            return tf.constant(self._fixed, tf.int64)

    def _by_replica(self, leaves: list[Tensor]) -> list[list[Tensor]]:
        count = len(leaves) // len(self.local)
        return [leaves[i : i + count] for i in range(0, len(leaves), count)]


def check_batched(element_spec: Any) -> None:
    """Checks from the type specs alone that elements are batches."""
    specs = components_of(element_spec)
    kinds = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    sizes: set[int | None] = set()
    have_rows = bool(specs)
    for spec in specs:
        if isinstance(spec, kinds) and spec.shape.rank != 0:
            sizes.add(spec.shape[0] if spec.shape.rank else None)
        else:
            have_rows = False
    if not have_rows or len(sizes - {None}) > 1:
        raise DataError(
            "The dataset is not batched, or its components do not belong together: each must be a "
            "tensor whose first axis is the rows of the batch.",
            f"element_spec={element_spec}",
            "Batch it with the global batch size: dataset.batch(global_batch_size). Let the model "
            "read a value that is the same for all rows, such as a tf.Variable. Give k rows of "
            "each example an axis of their own: tf.reshape(u, [rows, k, ...]).",
        )


def components_of(element_spec: Any) -> list[Any]:
    """Returns the type specs of a batch's tensors, leaving out None."""
    return [spec for spec in tf.nest.flatten(element_spec) if not _is_none(spec)]


def _is_none(spec: Any) -> bool:
    # In TensorFlow 2.19 the class has no public name.
    return isinstance(spec, type(tf.type_spec_from_value(None)))


def _packer(spec: Any) -> Callable[[Iterator[Tensor]], Shard]:
    """Returns a function that packs leaves into a structure, faster than ``tf.nest``."""
    if isinstance(spec, tf.TypeSpec):
        if _is_none(spec):
            return lambda leaves: None
        return next
    if type(spec) is tuple:
        parts = list(map(_packer, spec))
        return lambda leaves: tuple([part(leaves) for part in parts])
    leaf_packers = list(map(_packer, tf.nest.flatten(spec)))
    return lambda leaves: tf.nest.pack_sequence_as(spec, [pack(leaves) for pack in leaf_packers])
