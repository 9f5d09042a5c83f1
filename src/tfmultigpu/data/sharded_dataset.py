"""Datasets of global batches, cut into one shard per replica; every example is used once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tfmultigpu._patch import ignoring_warnings
from tfmultigpu.arguments import brief, check_count
from tfmultigpu.data import partition
from tfmultigpu.data.batch_format import any_rows
from tfmultigpu.data.consistency import compared_over_workers
from tfmultigpu.data.cut import Cut, check_batched, components_of
from tfmultigpu.data.passes import read_over
from tfmultigpu.data.preprocessing import (
    Preprocessing,
    check_preprocess,
    divide_own_rows,
    draw_seed,
    takes_seed,
)
from tfmultigpu.data.reader import Reader
from tfmultigpu.data.shard_iterator import ShardIterator
from tfmultigpu.data.shares import replica_shares
from tfmultigpu.data.sources import batches_of, global_batches, to_examples
from tfmultigpu.errors import DataError
from tfmultigpu.strategies.marked_runs import keep_offsets_of_runs
from tfmultigpu.strategies.scopes import current_strategy
from tfmultigpu.strategies.topology import describe, local_replicas, per_replica
from tfmultigpu.types import Batches, Function, Nested, Scalar, Shard, Strategy, Tensor

_MOST_SHOWN = 4  # Tensors of a batch, in the line of a dataset.


def distribute_dataset(
    dataset: Any,
    strategy: Strategy | None = None,
    *,
    batch_size: int | None = None,
    shares: Sequence[float] | None = None,
    small_batches: Literal["partition", "copy"] = "partition",
    prefetch_to_device: bool | None = None,
    preprocess: Function | None = None,
    seed: int | None = None,
) -> ShardedDataset:
    """Cuts each global batch of a dataset into one shard per replica.

    Each example of a global batch is on exactly one replica, in the partial last batch too. No
    shard is empty, except in a batch with fewer examples than replicas. A loop of your own gets one
    example of such a batch on each of the first replicas and none on the others, as in TensorFlow.
    The steps of this library compute the whole batch on every replica, and count each example once.

    Several workers run the same pipeline, and each takes its examples of each batch. So the dataset
    must yield the same batches on all of them: give ``shuffle`` a seed. Workers compare them.

    This replaces the method ``run`` of the strategy object, unless ``create_strategy`` has done so.
    The new ``run`` calls TensorFlow's, and lets ``tmg.rows`` know which batch it got.

    Args:
        dataset: A ``tf.data.Dataset`` of *global* batches in any nested structure (dict, tuple,
            dense, ragged, sparse); a function that returns a fresh generator of batches; arrays
            (one, a tuple or dict of them, or a list of several inputs) with ``batch_size``, not
            shuffled; or a ``keras.utils.PyDataset`` or torch ``DataLoader``.
        strategy: The strategy; None: ``tf.distribute.get_strategy()``.
        batch_size: Examples of a global batch, for arrays and ``preprocess`` only.
        shares: Relative share of each replica, such as ``(3, 1)`` or the result of ``plan_shares``.
        small_batches: How a loop of your own gets a batch with fewer examples than replicas:
            ``"partition"``, or ``"copy"`` for layers that crash or give NaN without examples, such
            as convolution and batch normalization. Every replica then holds all examples, which
            count on the first one alone: see ``row_weight``.
        prefetch_to_device: Whether to copy shards to the replicas ahead of time. None copies if a
            replica is not on a CPU, except finite data over several workers.
        preprocess: A function ``f(example)`` or ``f(example, seed)`` that makes an example ready,
            as in ``tf.data``'s ``map``. ``dataset`` then yields single examples that cost little (a
            number, a file name, a record). They are grouped into batches of ``batch_size``, and
            each process preprocesses only its own rows, in parallel. ``seed`` is an int64 tensor of
            shape ``[2]`` for the ``stateless`` functions of TensorFlow. It depends only on the seed
            of the run, the number of the pass and the number of the row.
        seed: The seed of the run for ``preprocess``. None: ``keras.utils.set_random_seed`` decides.

    Returns:
        A ``ShardedDataset``; each loop over it is a new pass. A batch has the structure of the
        dataset's elements. Give it to ``step(batch)`` or ``strategy.run(fn, args=(batch,))``, and
        ``iter()`` of the dataset to ``step.run``. ``next(iterator)`` and ``for batch in data`` also
        work inside a ``tf.function``.

    Raises:
        DataError: The dataset is unbatched, already distributed, one-shot, or not data; or its
            tensors differ in their number of rows; or an argument does not fit. Later: the workers
            read different data.
        TypeError: ``seed`` is not a whole number.

    Example:
        >>> import numpy as np, tfmultigpu as tmg
        >>> x, y = np.zeros((10, 3), "float32"), np.zeros((10,), "int32")
        >>> data = tmg.distribute_dataset((x, y), batch_size=4)
        >>> [int(labels.shape[0]) for features, labels in data]
        [4, 4, 2]
    """
    strategy = current_strategy(strategy, "distribute_dataset")
    if small_batches not in ("partition", "copy"):
        raise DataError(
            "small_batches must be 'partition' or 'copy'.",
            brief(small_batches),
            "A loop of your own sees each row once with 'partition'.",
        )
    whole_shares = replica_shares(shares, strategy.num_replicas_in_sync)
    preprocessing, reader = None, None
    if preprocess is not None:
        if batch_size is None:
            raise DataError(
                "preprocess takes single examples, of which global batches are formed.",
                "batch_size=None",
                "Write tmg.distribute_dataset(source, strategy, batch_size=64, preprocess=f).",
            )
        batch_size = check_count("batch_size", batch_size, error=DataError)
        check_preprocess(preprocess)
        batches = to_examples(dataset).batch(batch_size)
        if seed is None:
            seed = draw_seed(strategy) if takes_seed(preprocess) else 0
        preprocessing = Preprocessing(preprocess, check_count("seed", seed, -(2**63)))
    elif seed is not None:
        raise DataError("seed is for preprocess, which is missing.", f"seed={brief(seed)}")
    else:
        batches, reader = global_batches(dataset, batch_size)
    check_batched(batches.element_spec)
    return ShardedDataset(
        batches,
        strategy,
        whole_shares,
        prefetch_to_device,
        preprocessing,
        copies=small_batches == "copy",
        reader=reader,
    )


def row_weight(batch: Shard, strategy: tf.distribute.Strategy | None = None) -> Tensor:
    """Returns the weight of each row of a batch of ``distribute_dataset``, in a loop of your own.

    Call it outside ``strategy.run``, and give it to the replicas with the batch:
    ``strategy.run(fn, args=(batch, tmg.data.row_weight(batch, strategy)))``, then
    ``tmg.loss_sum(..., row_weight=weight)``.

    Args:
        batch: An element of a distributed dataset, or a part of it.
        strategy: The strategy of the dataset; None: ``tf.distribute.get_strategy()``.

    Returns:
        A float64 scalar for each replica: 1; if each replica holds all rows, 1 on the first and 0
        on the others.

    Raises:
        DataError: ``distribute_dataset`` did not cut the batch, or it was passed into a
            ``tf.function``, which drops its marks.

    Example:
        >>> import numpy as np, tfmultigpu as tmg
        >>> data = tmg.distribute_dataset(np.ones((5, 3)), batch_size=4)
        >>> [float(tmg.data.row_weight(batch)) for batch in data]
        [1.0, 1.0]
    """
    strategy = current_strategy(strategy, "row_weight")
    if strategy.num_replicas_in_sync == 1:
        return tf.ones([], tf.float64)
    offsets = partition.marked_offsets(batch)
    if offsets is None:
        raise DataError(
            "It is unknown whether the shards of the batch are copies.",
            "",
            "Give an element of tmg.distribute_dataset, and call row_weight before you pass the "
            "batch into your own tf.function.",
        )
    copies = partition.are_copies(offsets)
    weights = [partition.part_weight(copies, number) for number in local_replicas(strategy)]
    return per_replica(strategy, weights)


def should_prefetch(element_spec: Any, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether to prefetch to devices: dense numbers, to GPUs and TPUs."""
    devices = strategy.extended.worker_devices if strategy.num_replicas_in_sync > 1 else ()
    on_accelerators = any("CPU" not in device.upper() for device in devices)
    return on_accelerators and all(
        isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string
        for spec in components_of(element_spec)
    )


class ShardedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """Global batches cut into shards; ``distribute_dataset`` returns it.

    Attributes:
        batches: The global batches.
        strategy: The strategy the shards are for.
        shares: Relative share of each replica, integers.
        preprocessing: The preprocessing of rows, or None.
        prefetches_to_device: Whether shards are copied to the replicas ahead of time.
        cut: What cuts batches, and knows their type specs.
        reader: What makes the batches in Python; None if TensorFlow does.
    """

    def __init__(
        self,
        batches: Batches,
        strategy: tf.distribute.Strategy,
        shares: tuple[int, ...],
        prefetch_to_device: bool | None = None,
        preprocessing: Preprocessing | None = None,
        skip: int = 0,
        elements: Batches | None = None,
        copies: bool = False,
        reader: Reader | None = None,
    ) -> None:
        """Use ``distribute_dataset`` instead, which checks its arguments.

        With preprocessing a pass leaves out ``skip`` batches. ``elements`` are the batches, cut
        already, used if no other workers compare them; ``copies`` is as for ``Cut``.
        """
        self.batches, self.strategy, self.shares = batches, strategy, shares
        self.preprocessing, self.reader = preprocessing, reader
        self._cardinality = int(batches.cardinality()) if reader is None else reader.cardinality
        local = local_replicas(strategy)
        has_workers = len(local) < strategy.num_replicas_in_sync
        spec: Any = batches.element_spec
        if preprocessing is not None:
            own: Any = compared_over_workers(batches, strategy)
            own = preprocessing.own_rows(own, shares, local, skip)
            spec = own.element_spec[1]
        if prefetch_to_device is None:
            ends = self._cardinality != tf.data.INFINITE_CARDINALITY
            prefetch_to_device = should_prefetch(spec, strategy) and not (has_workers and ends)
        self.prefetches_to_device = prefetch_to_device
        self.cut = cut = Cut(strategy, shares, spec, prefetch_to_device, copies)
        keep_offsets_of_runs(strategy)
        # tf.data cuts in its own thread while the previous step runs.
        if preprocessing is not None:

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def divide(rows: Scalar, batch: Shard) -> tuple[Tensor, ...]:
                return cut.flatten(*divide_own_rows(rows, batch, shares, local))

            elements = own.map(divide if cut.is_needed else lambda rows, batch: batch)
        elif elements is None or has_workers:
            elements = compared_over_workers(batches, strategy)
            if cut.is_needed:
                elements = elements.map(cut.function)
        if prefetch_to_device:
            # One element per replica in turn, so that TensorFlow copies each ahead of time.
            self._elements = pieces = elements.flat_map(self.cut.deal)
            self._source = strategy.distribute_datasets_from_function(lambda context: pieces)
        else:
            self._elements = self._source = elements.prefetch(tf.data.AUTOTUNE)

    def __repr__(self) -> str:
        """Says what takes it: Keras' own ``fit``, which does not, prints it in its error."""
        count = "" if self._cardinality < 0 else f"{self._cardinality} batches "
        if self._cardinality == tf.data.INFINITE_CARDINALITY:
            count = "endless batches "
        specs = components_of(self.cut.element_spec)
        tensors = [f"{spec.dtype.name} {_axes(spec.shape)}" for spec in specs[:_MOST_SHOWN]]
        tensors += ["..."] * (len(specs) > _MOST_SHOWN)
        return (
            f"<ShardedDataset {count}of {', '.join(tensors)} for {describe(self.strategy)}: "
            "write tmg.fit(model, data), tmg.evaluate or tmg.predict, not model.fit>"
        )

    def __iter__(self) -> ShardIterator:
        """Begins a new pass over the data."""
        with tf.control_dependencies(self._begin_pass()):
            return ShardIterator.over(
                self._source,
                self._elements,
                self.cut,
                never_ends=self._cardinality == tf.data.INFINITE_CARDINALITY,
            )

    def _begin_pass(self) -> list[Nested]:
        """Says that a pass begins to what wants to know; returns the operations, in a graph."""
        begun: list[Nested] = []
        if self.preprocessing is not None:
            begun.append(self.preprocessing.begin_pass())
        if self.reader is not None and tf.inside_function():
            begun.append(tf.numpy_function(self.reader.begin, [], []))
        elif self.reader is not None:
            self.reader.begin()
        return begun

    def read_apart(self) -> ShardedDataset:
        """Returns the same data, for a loop that continues passes which no other one may end."""
        if self.reader is None:
            return self
        reader = self.reader.apart()
        return self.with_batches(batches_of(reader), reader=reader)

    def with_batches(
        self, batches: Batches, skip: int = 0, reader: Reader | None = None
    ) -> ShardedDataset:
        """Returns other batches of the same type, cut and preprocessed as these are."""
        return ShardedDataset(
            batches,
            self.strategy,
            self.shares,
            self.prefetches_to_device,
            self.preprocessing,
            skip,
            copies=self.cut.copies,
            reader=reader or self.reader,
        )

    def iterate_from(self, batch: int) -> tuple[ShardIterator, int]:
        """Begins a new pass at one of its batches; also returns how many were passed over."""
        if self.preprocessing is None or not batch:
            iterator = ShardedDataset.__iter__(self)
            return iterator, read_over(iterator.source, batch)
        rest = self.with_batches(self.batches, skip=batch)
        passed = batch
        if self._cardinality >= 0:
            passed = min(batch, self._cardinality)
        return iter(rest), passed

    def cardinality(self) -> int:
        """Returns the number of global batches in a pass; negative as of a ``tf.data.Dataset``."""
        return self._cardinality

    def __len__(self) -> int:
        """Returns the number of global batches in a pass; TypeError if unknown or infinite."""
        return len(self.batches) if self._cardinality < 0 else self._cardinality

    @property
    def element_spec(self) -> Any:
        """Type specs of what an iterator yields, as for ``tf.function(input_signature=[...])``."""
        if self.strategy.num_replicas_in_sync == 1:
            return self.cut.element_spec
        replicas = len(self.cut.local)
        kind: Function = type(tf.type_spec_from_value(per_replica(self.strategy, [1] * replicas)))

        def of_replicas(spec: Any) -> Any:
            return kind(*[any_rows(spec)] * replicas) if hasattr(spec, "shape") else spec

        return tf.nest.map_structure(of_replicas, self.cut.element_spec)

    def reduce(self, initial_state: Nested, reduce_func: Function) -> Nested:
        """Runs ``state = reduce_func(state, batch)`` over a pass; ``for`` in a graph calls it."""
        # TensorFlow warns about its own call on its own dataset; the user cannot change it.
        of_options = ignoring_warnings("To make it possible to preserve tf.data options")
        with of_options, tf.control_dependencies(self._begin_pass()):
            source = iter(self._source)

        def body(optional: Any, state: Nested) -> tuple[Nested, Nested]:
            state = reduce_func(state, self.cut.to_batch(optional.get_value()))
            return source.get_next_as_optional(), state

        _, state = tf.while_loop(
            lambda optional, state: optional.has_value(),
            body,
            [source.get_next_as_optional(), initial_state],
            parallel_iterations=1,
        )
        return state


def _axes(shape: tf.TensorShape) -> str:
    """Returns the axes of the rows of a batch, of which no axis is known in advance."""
    if shape.rank is None:
        return "of unknown shape"
    return f"[rows{''.join(f', {axis}' for axis in shape.as_list()[1:])}]"
