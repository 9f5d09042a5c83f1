"""Layout of the tensors that ``tf.data`` yields for the shards of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows, checked_rows
from tfmultigpu.data.small_batches import each_row_once
from tfmultigpu.strategies.topology import local_replicas, per_replica, strategy_devices

__all__ = ["ShardLayout", "components_of", "structure_of"]


class ShardLayout:
    """Layout of the elements of a sharded dataset.

    An element is a flat tuple: the tensors of each local shard in turn, then the offsets of all
    shards (``partition.batch_offsets``). It is flat because ``tf.data`` packs nested structures in
    Python at each read, which costs as much as reading. Prefetched to devices, each replica's
    element holds only its own shard.

    With one replica and dense tensors an element is the global batch itself, checked by the code
    that reads it: mapping a function over the data would cost more than a small step.

    Layouts are equal if they read elements alike, so that one trace of a ``tf.function`` serves all
    datasets of a type.

    Attributes:
        strategy: The strategy the shards are for.
        element_spec: The type specs of a global batch.
        on_devices: Whether elements are per-replica values, copied ahead of time.
        copies: Whether batches of fewer rows than replicas are given to users as copies.
        local: Ids of this process's replicas, among all replicas.
        whole: Whether each element is a whole global batch.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        element_spec: Any,
        on_devices: bool,
        copies: bool = False,
    ) -> None:
        """Stores what the attributes tell."""
        self.strategy = strategy
        self.element_spec = element_spec
        self.on_devices = on_devices
        self.copies = copies
        self.local = local_replicas(strategy)
        one = strategy.num_replicas_in_sync == 1 and not on_devices
        self.whole = one and _all_dense(element_spec)
        self._pack = _packer(element_spec)

    def __eq__(self, other: object) -> bool:
        """Compares the strategies, the type specs and the places of elements."""
        return (
            isinstance(other, ShardLayout)
            and self.strategy is other.strategy
            and (self.on_devices, self.copies) == (other.on_devices, other.copies)
            and bool(self.element_spec == other.element_spec)
            and structure_of(self.element_spec) == structure_of(other.element_spec)
        )

    def __hash__(self) -> int:
        """Leaves out the type specs: those of a dict have no hash."""
        return hash((id(self.strategy), self.on_devices))

    def flatten(self, shards: list[Any], offsets: Any) -> tuple[Any, ...]:
        """Returns the element that holds the local shards and the offsets of all shards."""
        return (*[leaf for leaf in tf.nest.flatten(shards) if leaf is not None], offsets)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def deal(self, *element: Any) -> tf.data.Dataset[Any]:
        """Returns one element per local replica, each with its own shard, in turn."""
        *leaves, offsets = element
        pieces = [tf.data.Dataset.from_tensors((*p, offsets)) for p in self._by_replica(leaves)]
        dataset = pieces[0]
        for piece in pieces[1:]:
            dataset = dataset.concatenate(piece)
        return dataset

    @property
    def piece_spec(self) -> tuple[Any, ...]:
        """Type specs of one element that ``deal`` returns."""
        offsets = tf.TensorSpec([self.strategy.num_replicas_in_sync + 1], tf.int64)
        return (*[any_rows(spec) for spec in components_of(self.element_spec)], offsets)

    def split(self, element: Any) -> tuple[list[Any], Any]:
        """Returns the local shards, one structure each, and the offsets of all shards."""
        if self.whole:
            element = checked_rows(element)
            return [element], partition.batch_offsets(element, (1,))
        *leaves, offsets = element
        if self.on_devices:
            results = self.strategy.experimental_local_results
            shards = zip(*(results(leaf) for leaf in leaves), strict=True)
            return [self._pack(iter(shard)) for shard in shards], results(offsets)[0]
        return [self._pack(iter(shard)) for shard in self._by_replica(leaves)], offsets

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def to_batch(self, element: Any) -> Any:
        """Returns a structure of per-replica values for ``strategy.run``, marked with its offsets.

        One replica gets plain tensors.
        """
        if self.whole:
            return partition.mark_whole(checked_rows(element))
        *leaves, offsets = element
        if self.strategy.num_replicas_in_sync == 1:
            return partition.mark_whole(self._pack(iter(leaves)))
        if self.on_devices:
            offsets = self.strategy.experimental_local_results(offsets)[0]
            devices = strategy_devices(self.strategy)
        else:
            leaves = per_replica(self.strategy, self._by_replica(leaves))
            devices = ("CPU:0",) * len(self.local)
        batch = self._pack(iter(leaves))
        if self.copies:
            return partition.mark_offsets(batch, offsets)
        return each_row_once(batch, offsets, self.strategy, devices)

    def _by_replica(self, leaves: list[Any]) -> list[list[Any]]:
        count = len(leaves) // len(self.local)
        return [leaves[i : i + count] for i in range(0, len(leaves), count)]


def structure_of(batch: Any) -> str:
    """Returns the kinds of containers of a batch or of its type specs, and the names in them.

    Named tuples are equal in Python if their values are, whatever their fields.

    Example:
        >>> from tfmultigpu.data.element_layout import structure_of
        >>> structure_of((1.0, {"a": None}))
        "(0, {'a': None})"
    """
    return repr(tf.nest.map_structure(lambda one: None if one is None else 0, batch))


def components_of(element_spec: Any) -> list[Any]:
    """Returns the type specs of a batch's tensors, leaving out None."""
    return [spec for spec in tf.nest.flatten(element_spec) if not _is_none(spec)]


def _all_dense(element_spec: Any) -> bool:
    specs = components_of(element_spec)
    return bool(specs) and all(
        isinstance(spec, tf.TensorSpec) and bool(spec.shape.rank) for spec in specs
    )


def _is_none(spec: Any) -> bool:
    # The class itself has a public name from TensorFlow 2.17 on only.
    return isinstance(spec, type(tf.type_spec_from_value(None)))


def _packer(spec: Any) -> Callable[[Iterator[Any]], Any]:
    """Returns a function that packs leaves into a structure, faster than ``tf.nest``."""
    if isinstance(spec, tf.TypeSpec):
        return (lambda leaves: None) if _is_none(spec) else next
    if type(spec) is tuple:
        parts = [_packer(part) for part in spec]
        return lambda leaves: tuple([part(leaves) for part in parts])
    if type(spec) is dict:
        # The leaves of a dict come sorted by key; the dict itself keeps its order.
        named = {key: _packer(spec[key]) for key in sorted(spec)}

        def pack(leaves: Iterator[Any]) -> Any:
            found = {key: part(leaves) for key, part in named.items()}
            return {key: found[key] for key in spec}

        return pack
    present = [not _is_none(leaf) for leaf in tf.nest.flatten(spec)]
    return lambda leaves: tf.nest.pack_sequence_as(
        spec, [next(leaves) if here else None for here in present]
    )
