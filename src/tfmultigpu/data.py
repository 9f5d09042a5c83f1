"""From a dataset of global batches to shards for each replica: exact coverage, never empty."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmultigpu import rows as rows_lib
from tfmultigpu.errors import DataError
from tfmultigpu.shares import check_shares, integer_shares
from tfmultigpu.sources import to_dataset

__all__ = ["ShardIterator", "ShardedDataset", "distribute_dataset"]


def distribute_dataset(
    dataset: Any,
    strategy: tf.distribute.Strategy | None = None,
    *,
    batch_size: int | None = None,
    shares: Sequence[float] | None = None,
    sharding: str = "auto",
    prefetch_to_device: bool | None = None,
) -> ShardedDataset:
    """Cuts each global batch of a dataset into one shard per replica.

    Each row of a global batch is on exactly one replica, the partial batch at the end included, and
    no shard is empty. A batch with fewer rows than replicas goes whole to every replica; the train,
    eval and predict steps of this library then count each row once. In a loop written by hand,
    ``global_mean`` of a ``loss_sum`` is right for such a batch as it is.

    Under several workers every worker runs the same pipeline and takes its rows of each batch, so
    the dataset must yield the same batches on all of them: give ``shuffle`` a seed.

    Args:
        dataset: A ``tf.data.Dataset`` of *global* batches in any nested structure (dict, tuple,
            dense, ragged, sparse), a ``keras.utils.PyDataset``, a function without arguments that
            returns a fresh generator of batches, or arrays (one, or a tuple or dict of them) with
            ``batch_size``. Arrays are not shuffled.
        strategy: Where to run; ``tf.distribute.get_strategy()`` where None.
        batch_size: Rows of a global batch, for arrays only.
        shares: Relative share of each global batch per replica, positive, such as ``(3, 1)`` or
            the result of ``plan_shares``. Equal where None.
        sharding: How workers divide the data. ``"auto"`` and ``"rows"``: by the rows of each batch.
        prefetch_to_device: Copy shards to the replicas ahead of time. None: where a replica is not
            on a CPU.

    Returns:
        A re-iterable of shards. Each item has the structure of the dataset's elements and goes to
        ``step(batch)`` or ``strategy.run(fn, args=(batch,))``. Its ``iter()`` goes to
        ``step.run(iterator, steps)``, and ``next(iterator)`` and ``for batch in data`` also work
        inside a ``tf.function``.

    Raises:
        DataError: The dataset is unbatched, already distributed, one-shot, or not data; or its
            tensors differ in their number of rows.
        ShareError: ``shares`` are not one positive number per replica.

    Example:
        >>> import numpy as np, tfmultigpu as tmg
        >>> x, y = np.zeros((10, 3), "float32"), np.zeros((10,), "int32")
        >>> data = tmg.distribute_dataset((x, y), batch_size=4)
        >>> [int(labels.shape[0]) for features, labels in data]
        [4, 4, 2]
    """
    strategy = tf.distribute.get_strategy() if strategy is None else strategy
    if sharding not in ("auto", "rows"):
        raise DataError(
            f"sharding must be 'auto' or 'rows'. Received: sharding={sharding!r}. To shard by files "
            "give each worker the same list of files and let 'auto' divide the rows."
        )
    replicas = strategy.num_replicas_in_sync
    check_shares(shares or (1,) * replicas, replicas)
    batches = to_dataset(dataset, batch_size)
    check_batched(batches.element_spec)
    if prefetch_to_device is None:
        prefetch_to_device = replicas > 1 and not all(
            "CPU" in device.upper() for device in strategy.extended.worker_devices
        )
    return ShardedDataset(
        batches, strategy, integer_shares(shares or (1,) * replicas), prefetch_to_device
    )


class ShardedDataset(tf.distribute.DistributedDataset):
    """Global batches cut into shards; what ``distribute_dataset`` returns.

    Attributes:
        strategy: The strategy the shards are for.
        shares: Relative share of each replica, integers.
        prefetches_to_device: Whether shards are copied to the replicas ahead of time.
    """

    def __init__(
        self,
        batches: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
        shares: tuple[int, ...],
        prefetch_to_device: bool,
    ) -> None:
        """Use ``distribute_dataset``, which checks what it is given."""
        self.strategy = strategy
        self.shares = shares
        self.prefetches_to_device = prefetch_to_device
        self._element_spec = batches.element_spec
        self._cardinality = batches.cardinality()
        self._local = rows_lib.local_replicas(strategy)
        self._cut = tf.function(self._cut_batch, input_signature=[self._element_spec])
        if prefetch_to_device:
            # One element per replica, dealt out in turn, so that each is copied ahead of time.
            pieces = batches.flat_map(self._pieces)
            self._source = strategy.distribute_datasets_from_function(lambda context: pieces)
        else:
            self._source = batches.prefetch(tf.data.AUTOTUNE)

    def __iter__(self) -> ShardIterator:
        """Begins a new pass over the data."""
        return ShardIterator(iter(self._source), self)

    def __len__(self) -> int:
        """Number of global batches in a pass.

        Raises:
            DataError: The number is unknown or infinite.
        """
        count = int(self._cardinality)
        if count < 0:
            kind = "infinite" if count == tf.data.INFINITE_CARDINALITY else "unknown in advance"
            raise DataError(
                f"The number of batches is {kind}. Count steps instead, for example with "
                "step.run(iterator, steps), or state it with "
                "dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        return count

    @property
    def element_spec(self) -> Any:
        """The type of one *global* batch."""
        return self._element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Runs ``state = reduce_func(state, batch)`` over a pass; ``for`` in a graph calls this."""
        source = iter(self._source)

        def body(optional: Any, state: Any) -> tuple[Any, Any]:
            batch = self.to_replicas(*self.split(optional.get_value()))
            state = reduce_func(state, batch)
            return source.get_next_as_optional(), state

        _, state = tf.while_loop(
            lambda optional, state: optional.has_value(),
            body,
            [source.get_next_as_optional(), initial_state],
            parallel_iterations=1,
        )
        return state

    def split(self, element: Any) -> tuple[list[Any], Any]:
        """Returns the shards of this worker's replicas, and the rows of the global batch.

        Args:
            element: What the underlying iterator (``ShardIterator.source``) yields.

        Returns:
            A list with one structure per local replica, and an int64 scalar.
        """
        if self.prefetches_to_device:
            parts = [self.strategy.experimental_local_results(leaf) for leaf in _flat(element)]
            packed = [tf.nest.pack_sequence_as(element, list(leaves)) for leaves in zip(*parts)]
            return [shard for shard, _ in packed], packed[0][1]
        return (self._cut_batch if tf.inside_function() else self._cut)(element)

    def to_replicas(self, shards: list[Any], global_rows: Any) -> Any:
        """Returns shards as one structure of per-replica values that ``strategy.run`` takes."""
        if len(shards) == 1 and self.strategy.num_replicas_in_sync == 1:
            return rows_lib.mark_global_rows(shards[0], global_rows)
        turn = iter(shards)
        batch = self.strategy.experimental_distribute_values_from_function(lambda _: next(turn))
        return rows_lib.mark_global_rows(batch, global_rows)

    def _cut_batch(self, batch: Any) -> tuple[list[Any], Any]:
        with tf.control_dependencies(rows_lib.check_rows_agree(batch)):
            rows = tf.identity(rows_lib.count_rows(batch))
        with tf.control_dependencies([rows]):
            batch = tf.nest.map_structure(_identity, batch)
        return rows_lib.cut_rows(batch, self.shares, self._local), rows

    def _pieces(self, *element: Any) -> tf.data.Dataset:
        batch = element[0] if len(element) == 1 and not _is_tuple(self._element_spec) else element
        shards, rows = self._cut_batch(batch)
        pieces = [tf.data.Dataset.from_tensors((shard, rows)) for shard in shards]
        dataset = pieces[0]
        for piece in pieces[1:]:
            dataset = dataset.concatenate(piece)
        return dataset


@dataclasses.dataclass(eq=False)
class ShardIterator(Iterator[Any]):
    """One pass over a ``ShardedDataset``; made by ``iter(dataset)``.

    Attributes:
        source: The TensorFlow iterator underneath.
        dataset: What is iterated over.
    """

    source: Any
    dataset: ShardedDataset

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy the shards are for."""
        return self.dataset.strategy

    @property
    def split_key(self) -> Any:
        """What ``split`` depends on besides its argument, hashable."""
        return self.dataset.shares, self.dataset.prefetches_to_device

    def split(self, element: Any) -> tuple[list[Any], Any]:
        """Returns what ``source`` yielded as local shards and the rows of the global batch."""
        return self.dataset.split(element)

    def __iter__(self) -> ShardIterator:
        """Returns itself.

        Raises:
            DataError: Inside a ``tf.function``, where a ``for`` over an iterator would never end.
        """
        if tf.inside_function():
            raise DataError(
                "A for loop over an iterator inside a tf.function would be unrolled without end. "
                "Loop over the dataset itself (for batch in data), or call next(iterator)."
            )
        return self

    def __next__(self) -> Any:
        """Returns the next batch of shards.

        Raises:
            StopIteration: The data has ended (inside a ``tf.function``:
                ``tf.errors.OutOfRangeError`` when it runs).
            DataError: The batch has no rows, or its tensors differ in their number of rows.
        """
        if tf.inside_function():
            element = self.source.get_next()
            return self.dataset.to_replicas(*self.split(element))
        try:
            element = next(self.source)
            return self.dataset.to_replicas(*self.split(element))
        except tf.errors.InvalidArgumentError as error:
            raise rows_lib.as_data_error(error) from None

    def __tf_flatten__(self) -> tuple[tuple[ShardedDataset], tuple[Any]]:
        """Lets a ``tf.function`` take the iterator as an argument, one trace for all passes."""
        return (self.dataset,), (self.source,)

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[ShardedDataset], components: tuple[Any]
    ) -> ShardIterator:
        """The inverse of ``__tf_flatten__``."""
        return cls(components[0], metadata[0])


def check_batched(element_spec: Any) -> None:
    """Checks, from the types alone, that elements look like batches.

    Raises:
        DataError: A component is a scalar, or components differ in their static first axis.
    """
    shapes = [
        spec.shape for spec in _flat(element_spec) if getattr(spec, "shape", None) is not None
    ]
    if not _flat(element_spec):
        raise DataError(f"The dataset has no components. Received: element_spec={element_spec}.")
    if any(shape.rank == 0 for shape in shapes):
        raise DataError(
            "The dataset is not batched: a component is a scalar per element. "
            f"Received: element_spec={element_spec}. Batch it first, with the global batch size: "
            "dataset.batch(global_batch_size)."
        )
    sizes = {shape[0] for shape in shapes if shape.rank} - {None}
    if len(sizes) > 1:
        raise DataError(
            f"The components of an element differ in their first axis: {sorted(sizes)}. "
            f"Received: element_spec={element_spec}. Either the dataset is not batched (call "
            "dataset.batch(global_batch_size)), or features and labels do not belong together."
        )


def _flat(structure: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _is_tuple(spec: Any) -> bool:
    return isinstance(spec, tuple)


def _identity(tensor: Any) -> Any:
    return (
        None
        if tensor is None
        else tf.nest.map_structure(tf.identity, tensor, expand_composites=True)
    )
